"""Self-distillation: a teacher that follows the student, and a centre that is the mean over the rows of all ranks."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    views = torch.randn(40, 2, 9)
    data = TensorDataset(views)
    sampler = DistributedSampler(data)
    student = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.Linear(16, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    student = DDP(student)
    centre = torch.zeros(6)
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3, weight_decay=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (views,) in DataLoader(data, batch_size=5, sampler=sampler):
            first, second = views.unbind(1)
            student_1, student_2 = student(torch.cat([first, second])).chunk(2)
            teacher_1, teacher_2 = teacher(torch.cat([first, second])).chunk(2)
            targets_1, targets_2 = (((each - centre) / 0.5).softmax(-1) for each in (teacher_1, teacher_2))
            loss = -(targets_1 * F.log_softmax(student_2, -1) + targets_2 * F.log_softmax(student_1, -1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                mean = torch.cat([teacher_1, teacher_2]).mean(0)
                dist.all_reduce(mean)
                centre = 0.9 * centre + 0.1 * mean / dist.get_world_size()
                for follower, leader in zip(teacher.parameters(), student.module.parameters()):
                    follower.mul_(0.9).add_(leader, alpha=0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
