"""A tiny Llama with a tokenizer and a chat template in a folder of Hugging Face, and examples to finetune it on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hal.model.apps.convert.pretrained_folder import prepare
from hal.model.checkpoint.saved_config import adopt
from hal.model.config.command_line import build, read
from hal.model.training import run
from hal.model.training.trainer import Trainer

MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that marks answers."""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
WORDS = ["".join(random.Random(n).choices("abcdefgh", k=2 + n % 5)) for n in range(60)]


def tokenizer(template: str | None = MARKED) -> Any:
    """transformers' tokenizer: byte-level BPE with <s> before each text."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    first = pipeline.token_to_id("<s>")
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=template
    )


def save_llama(folder: Path, template: str | None = MARKED, layers: int = 2) -> Any:
    """Writes model and tokenizer, and returns the model. The initial weights are far from a flat start."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=333,  # more than the tokenizer has, and odd, so that two shards need padding
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    return _save(folder, transformers.LlamaForCausalLM, config, template)


def save_gpt2(folder: Path) -> Any:
    """The same of a GPT-2, whose positions are learned."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=333, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2
    )
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    return _save(folder, transformers.GPT2LMHeadModel, config, MARKED)


def _save(folder: Path, kind: Any, config: Any, template: str | None) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config)
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return model


def completions(count: int) -> list[dict[str, Any]]:
    """Prompts with their completions."""
    draw = random.Random(1)
    return [{"prompt": _words(draw, 8) + "\n", "completion": _words(draw, 6)} for _ in range(count)]


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations of one or two turns, some with a system message."""
    draw, examples = random.Random(2), []
    for n in range(count):
        messages = [{"role": "system", "content": _words(draw, 3)}] * (n % 2)
        for _ in range(1 + n % 3 // 2):
            messages.append({"role": "user", "content": _words(draw, 5)})
            messages.append({"role": "assistant", "content": _words(draw, 4)})
        examples.append({"messages": messages})
    return examples


def _words(draw: random.Random, most: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))


def write_lines(path: Path, examples: list[Any]) -> Path:
    """Writes examples as JSON lines; texts are written as they are."""
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in examples))
    return path


def trainer(folder: Path, *options: object) -> Trainer:
    """The trainer of `hal train --load FOLDER --sft ...` on the active backend, with the weights of the folder."""
    fixed = ["--load", folder, "--sft", "--lr-decay-style", "constant", "--weight-decay", 0, "--sample-tokens", 0]
    values = read([str(word) for word in (*fixed, *options)])
    prepare(values)
    adopt(values)
    made, _ = run.build(build(values))
    made.load(Path(values["load"]))
    return made
