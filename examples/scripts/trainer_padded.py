"""Transformers' Trainer with rows of different lengths, which its collator pads to the longest of a batch."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Sentences(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 14, (24,), generator=draw).tolist()
        self.rows = [torch.randint(1, 32, (length,), generator=draw) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    shape = len(rows), longest
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, -100),
    }
    for place, row in enumerate(rows):
        tokens = row["input_ids"]
        batch["input_ids"][place, : len(tokens)] = tokens
        batch["attention_mask"][place, : len(tokens)] = 1
        batch["labels"][place, : len(tokens)] = tokens
    return batch


torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    max_steps=6,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    learning_rate=0.01,
)
Trainer(model=model, args=arguments, data_collator=pad, train_dataset=Sentences()).train()
