"""Options that are valid one by one and contradict each other are refused, with the reason."""

import re

import pytest

from hal.model.config.command_line import parse
from hal.model.config.schema import ConfigError
from hal.model.config.validation import evaluates


@pytest.mark.parametrize(
    "line, words",
    [
        ("--train-samples 40 --train-iters 5", "--train-iters contradicts --train-samples"),
        ("--train-samples 40 --lr-decay-iters 5", "give --lr-decay-samples"),
        ("--lr-decay-samples 40", "it needs --train-samples"),
        ("--train-samples 40 --lr-warmup-samples 40", "--lr-warmup-samples 40 must be below"),
        ("--rampup-batch-size 4 2 100 --global-batch-size 9 --micro-batch-size 1", "must be START INCREMENT SAMPLES"),
        ("--rampup-batch-size 4 4", "must be START INCREMENT SAMPLES"),
        ("--step-batch-size-schedule 0:4 9:", "must be TOKENS:SIZE"),
        ("--step-batch-size-schedule 5K:4", "must be TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:4 9K:8 9K:12", "must be TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:4 9K:0", "must be TOKENS:SIZE"),
        ("--step-batch-size-schedule 0:4 9M:8", "needs --train-samples"),
        ("--step-batch-size-schedule 0:4 9M:8 --global-batch-size 16", "ends with 8; remove one of them"),
        ("--step-batch-size-schedule 0:4 9M:8 --train-samples 99 --rampup-batch-size 4 4 9", "contradict each other"),
        (
            "--step-batch-size-schedule 0:3 9M:8 --train-samples 99 --micro-batch-size 2",
            "--step-batch-size-schedule: the batch size 3 is not divisible",
        ),
        ("--rampup-batch-size 2 1 100 --global-batch-size 4 --micro-batch-size 2", "the batch size 3 is not divisible"),
        ("--decoupled-lr 0.1 --decoupled-min-lr 1", "is above --decoupled-lr"),
        ("--start-weight-decay 1", "it needs --weight-decay-incr-style"),
        ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
        ("--squared-relu --swiglu", "contradict each other"),
        ("--mock-data --text-file x", "contradict each other"),
        ("--train-data-path x --data-path y", "contradict"),
        ("--train-data-path x --split 8,1,1", "--split would be ignored"),
        ("--valid-data-path x --eval-interval 2", "needs --train-data-path"),
        ("--train-data-path x --valid-data-path y", "needs --eval-interval"),
        ("--train-data-path x --eval-interval 2", "give --valid-data-path"),
        ("--reset-position-ids --position-embedding-type none", "would be ignored"),
        ("--window-attn-skip-freq [1,0] --pre-tokens 3", "--window-attn-skip-freq: '[1,0]' describes 2 layers"),
        ("--no-rope-freq 0 --position-embedding-type rope", "--no-rope-freq: '0' is neither a positive integer"),
        (
            "--output-logit-softcapping 30 --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
            "computes the loss without logits",
        ),
        (
            "--attn-logit-softcapping 50 --context-parallel-size 2 --nproc-per-node 2",
            "--context-parallel-algo ring computes gradients block by block",
        ),
        ("--split 1,nan,1", "three proportions"),
    ],
)
def test_options_that_contradict_each_other(line, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse(line.split(), {})


GRAPHS = "--cuda-graphs --attention-dropout 0 --hidden-dropout 0"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--attention-dropout 0.1", "--attention-dropout"),
        ("--nproc-per-node 2 --tensor-model-parallel-size 2 --num-attention-heads 4", "several processes"),
        ("--num-experts 4 --disable-bias-linear", "--num-experts"),
        ("--reset-attention-mask", "--reset-position-ids, --reset-attention-mask or --sft"),
        ("--rampup-batch-size 4 4 80 --global-batch-size 8", "--rampup-batch-size"),
        ("--fp16 --rerun-mode validate_results", "--fp16, --rerun-mode"),
        ("--verify-ops 0.5", "--verify-ops"),
        ("--checkpoint-in-cpu --recompute-granularity full --recompute-method uniform", "--checkpoint-in-cpu"),
    ],
)
def test_a_recorded_step_is_refused_what_changes_from_step_to_step(options, named):
    with pytest.raises(ConfigError, match=re.escape(f"Remove it, or: {named}")):
        parse([*GRAPHS.split(), *options.split()], {})
    parse([*GRAPHS.split(), "--mock-data", "--bf16"], {})


def test_a_split_without_validation_data_does_not_evaluate():
    config = parse(["--split", "100,0,0", "--eval-interval", "5", "--eval-iters", "2", "--mock-data"], {})
    assert not evaluates(config) and any("--eval-interval" in note for note in config.notes)
