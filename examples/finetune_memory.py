"""Fine-tune the memory of a released language model, with adapters beside it, on one machine.

    python examples/finetune_memory.py [checkpoint] [--tables '*.embed_tokens_per_layer'] [--output finetuned]

The checkpoint is a folder that transformers can load; without one, a small random Gemma is made. The memory's rows stay
there, and only those that a batch touches are read and trained, the next batch's while this one is computed. The
training is killed in its second epoch, to show that it goes on from the last checkpoint. What is saved is an adapter
of PEFT's and a file of the rows that changed, not the table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import speedswap

WORDS, LENGTH, DOCUMENTS = 8192, 16, 64


def make_checkpoint(folder: Path) -> None:
    """Save a small random model; its memory is larger than its layers."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 0}
    memory = {"vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 64}
    config = Gemma4TextConfig(vocab_size=WORDS, sliding_window=32, **heads, **sizes, **memory)
    Gemma4ForCausalLM(config).save_pretrained(folder)


def facts() -> list[dict[str, Tensor]]:
    """Return documents in which each word is followed by the one that belongs to it, as a memory can learn."""
    draw = torch.Generator().manual_seed(0)
    follower = torch.randperm(WORDS, generator=draw)
    words = torch.randint(WORDS, (DOCUMENTS, LENGTH // 2), generator=draw)
    documents = torch.stack([words, follower[words]], dim=2).flatten(1)
    return [{"input_ids": each, "labels": each} for each in documents]


class AheadTrainer(Trainer):
    """Reads the rows of the next batch while this one is computed."""

    batches: Any = None

    def get_batch_samples(self, batches: Any, *rest: Any) -> Any:
        if batches is not self.batches:  # a new epoch's
            ids = {memory_of(self.model): lambda batch: batch["input_ids"]}
            self.batches, self.ahead = batches, iter(speedswap.lookahead(batches, ids))
        return super().get_batch_samples(self.ahead, *rest)


class Kill(TrainerCallback):
    """Ends the process at a step, as a power failure or a preemption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def memory_of(model: torch.nn.Module) -> speedswap.Embedding:
    """Return the embedding over the checkpoint."""
    return next(each for each in model.modules() if isinstance(each, speedswap.Embedding))


def load(checkpoint: Path, tables: str, output: Path) -> Any:
    """Return the model with new adapters, and a memory that is trained."""
    place = speedswap.Disk(output / "rows", scratch=True)  # the trainer's checkpoints have what is to last
    model = speedswap.from_pretrained(AutoModelForCausalLM, checkpoint, tables, place)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    memory_of(model).weight.requires_grad_(True)  # PEFT has frozen it
    return model


def train(checkpoint: Path, tables: str, output: Path, epochs: int, kill_at: int | None) -> None:
    """Train from the last checkpoint, if there is one, and save adapters and rows."""
    model = load(checkpoint, tables, output)
    arguments = TrainingArguments(
        os.fspath(output / "run"),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=6,
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    callbacks = [speedswap.RowsCallback(), *([] if kill_at is None else [Kill(kill_at)])]
    trainer = AheadTrainer(model, arguments, train_dataset=facts(), callbacks=callbacks)
    last = get_last_checkpoint(arguments.output_dir) if os.path.isdir(arguments.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    speedswap.save_pretrained(model, output / "adapters")


def in_process(*arguments: Any) -> int | None:
    """Train in another process, which may be killed; return its exit code."""
    process = multiprocessing.get_context("spawn").Process(target=train, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def main(arguments: list[str] | None = None) -> Any:
    """Return the loaded result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--tables", default="*.embed_tokens_per_layer")
    parser.add_argument("--output", default=Path("finetuned"), type=Path)
    parser.add_argument("--epochs", default=8, type=int)
    parser.add_argument("--kill-at", default=12, type=int, help="the step at which to kill the training; 0: never")
    options = parser.parse_args(arguments)
    checkpoint = options.checkpoint or options.output / "base"
    if options.checkpoint is None:
        make_checkpoint(checkpoint)
    given = checkpoint, options.tables, options.output, options.epochs
    if options.kill_at:
        print(f"killed at step {options.kill_at}: exit code {in_process(*given, options.kill_at)}")
    if in_process(*given, None) != 0:
        raise SystemExit("the training failed")
    adapters = options.output / "adapters"
    model = speedswap.from_pretrained(AutoModelForCausalLM, adapters, storage="pageable")
    sizes = {path.name: path.stat().st_size for path in adapters.glob("*.safetensors")}
    print(f"saved: {', '.join(f'{name} {size:,} bytes' for name, size in sorted(sizes.items()))}")
    return PeftModel.from_pretrained(model, adapters)


if __name__ == "__main__":
    main()
