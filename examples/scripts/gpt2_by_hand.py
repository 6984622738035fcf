"""Transformers' GPT-2 in a custom loop: the model's own loss, get_scheduler, accumulation."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

ACCUMULATION = 2


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 32, (64, 10))]
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = DDP(GPT2LMHeadModel(config))
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3
    )
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=8)
    model.train()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            model.require_backward_grad_sync = number % ACCUMULATION == 0
            (model(**batch).loss / ACCUMULATION).backward()
            if number % ACCUMULATION == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
