"""Transformers' Trainer on a tiny model that nothing is loaded for; one mistake on demand."""

import os
import sys

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(Dataset):
    def __init__(self):
        self.rows = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {"input_ids": self.rows[place], "labels": self.rows[place]}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
size = int(os.environ["WORLD_SIZE"])
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=6,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    learning_rate=0.01 * (size if "--scale-rate" in sys.argv else 1),
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
