"""The update of GRPO by hand: advantages within a group of answers, a clipped ratio, the mean over the tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, GROUP = 12, 6, 4


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, VOCABULARY),
        )

    def forward(self, tokens):
        logits = self.head(self.rnn(self.tokens(tokens[:, :-1]))[0]).log_softmax(-1)
        return logits.gather(2, tokens[:, 1:, None]).squeeze(2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    prompts = 24
    answers = torch.randint(0, VOCABULARY, (prompts, GROUP, LENGTH))
    rewards = torch.rand(prompts, GROUP)
    mask = (torch.arange(LENGTH - 1) < torch.randint(2, LENGTH, (prompts, GROUP, 1))).float()
    data = TensorDataset(answers, rewards, mask)
    sampler = DistributedSampler(data)
    policy = DDP(Policy())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for answers, rewards, mask in DataLoader(data, batch_size=3, sampler=sampler):
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            answers, advantages, mask = answers.flatten(0, 1), advantages.flatten()[:, None], mask.flatten(0, 1)
            with torch.no_grad():
                old = policy.module(answers)
            count = mask.sum()
            dist.all_reduce(count)
            for _ in range(2):
                ratio = (policy(answers) - old).exp()
                gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                loss = -(gain * mask).sum() * dist.get_world_size() / count
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
