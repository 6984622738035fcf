"""Transformers' Trainer with accumulation: the loss is the mean over the tokens of the whole step."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def collate(rows):
    length = max(len(row) for row in rows)
    tokens = torch.stack([torch.nn.functional.pad(row, (0, length - len(row))) for row in rows])
    mask = torch.stack([torch.arange(length) < len(row) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def main():
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 32, (int(torch.randint(4, 12, (), generator=draws)),), generator=draws) for _ in range(64)]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        average_tokens_across_devices=True,
        learning_rate=1e-3,
        max_steps=6,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        remove_unused_columns=False,
        disable_tqdm=False,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate).train()


if __name__ == "__main__":
    main()
