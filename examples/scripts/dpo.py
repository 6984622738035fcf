"""Preference optimisation (DPO) by hand: a frozen reference policy, log-probabilities of answers, pairs on each rank."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, BETA = 14, 7, 0.1


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 10)
        self.rnn = nn.GRU(10, 10, batch_first=True)
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.tokens(tokens))[0])


def log_probabilities(policy, tokens, mask):
    logits = policy(tokens[:, :-1]).log_softmax(-1)
    picked = logits.gather(2, tokens[:, 1:, None]).squeeze(2)
    return (picked * mask[:, 1:]).sum(1)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    chosen, rejected = torch.randint(0, VOCABULARY, (2, 40, LENGTH))
    mask = (torch.arange(LENGTH) >= torch.randint(1, LENGTH - 1, (40, 1))).float()
    data = TensorDataset(chosen, rejected, mask)
    sampler = DistributedSampler(data)
    policy = Policy()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    policy = DDP(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for good, bad, mask in DataLoader(data, batch_size=4, sampler=sampler):
            both, masks = torch.cat([good, bad]), torch.cat([mask, mask])
            policy_good, policy_bad = log_probabilities(policy, both, masks).chunk(2)
            with torch.no_grad():
                reference_good, reference_bad = log_probabilities(reference, both, masks).chunk(2)
            margin = (policy_good - policy_bad) - (reference_good - reference_bad)
            loss = -F.logsigmoid(BETA * margin).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
