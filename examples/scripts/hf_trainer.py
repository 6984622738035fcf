"""Transformers' Trainer on a tiny Llama with random weights: accumulation, warm-up, sentences padded to the longest."""

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Sentences(Dataset):
    def __init__(self, count=48):
        draws = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 10, (count,), generator=draws).tolist()
        self.rows = [torch.randint(1, 32, (length,), generator=draws) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index]}


def collate(features):
    rows = [feature["input_ids"] for feature in features]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=0)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(attention_mask == 0, -100),
    }


def main():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=Sentences(), data_collator=collate).train()


if __name__ == "__main__":
    main()
