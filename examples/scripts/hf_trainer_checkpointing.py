"""Transformers' Trainer with gradient checkpointing, on rows of one length."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(Dataset):
    def __init__(self, count=32):
        self.rows = torch.randint(0, 24, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=8, n_embd=12, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=5e-3,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Tokens()).train()


if __name__ == "__main__":
    main()
