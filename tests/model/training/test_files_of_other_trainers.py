"""A small model of the options of other trainers' files has the losses of the same model in HAL's own options.

The options and values are facts of the named files; layers, sizes, batches and data are cut by options. The real files
are compared by the same method in docs/verified/other-files.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hal.model.config.command_line import parse
from hal.model.training.run import build

CUT = """--train-iters 3 --backend cpu_ref --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 255 --eval-iters 0"""
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""

MEGATRON_LM = (  # examples/mixtral/train_mixtral_8x7b_distributed.sh, core_v0.16.1
    f"""--use-mcore-models {LLAMA} --init-method-std 0.01 --group-query-attention --num-query-groups 2
    --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --split 99990,8,2 --lr 1e-4
    --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500
    --clip-grad 1.0 --bf16 --use-distributed-optimizer --sequence-parallel --moe-ffn-hidden-size 64""",
    f"""{LLAMA} --num-query-groups 2 --rotary-base 1000000 --init-method-std 0.01 --num-experts 8
    --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01 --bf16 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine
    --lr-decay-iters 320000 --lr-warmup-iters 500 --weight-decay 0.1 --split 99990,8,2""",
)
MINDSPEED_LLM = (  # examples/mcore/qwen25/pretrain_qwen25_7b_32k_ptd.sh, 2.0.0
    f"""--use-mcore-models {LLAMA} --add-qkv-bias --group-query-attention --num-query-groups 2 --use-flash-attn
    --use-fused-swiglu --norm-epsilon 1e-6 --use-fused-rmsnorm --rotary-base 1000000 --use-fused-rotary-pos-emb
    --make-vocab-size-divisible-by 1 --padded-vocab-size 512 --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7
    --lr-warmup-fraction 0.01 --init-method-std 0.01 --weight-decay 1e-1 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --initial-loss-scale 4096 --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --bf16 --split 100,0,0 --distributed-backend nccl""",
    f"""{LLAMA} --add-qkv-bias --num-query-groups 2 --norm-epsilon 1e-6 --rotary-base 1000000 --pad-vocab-size-to 512
    --lr 1.25e-6 --lr-decay-style cosine --min-lr 1.25e-7 --lr-warmup-fraction 0.01 --init-method-std 0.01
    --weight-decay 0.1 --adam-beta2 0.95 --bf16 --split 100,0,0""",
)
MEGATRON_DEEPSPEED = (  # examples_deepspeed/rebase/ds_pretrain_gpt_1.3B.sh, main, and its JSON
    """--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.013
    --lr-decay-tokens 320000 --lr-warmup-tokens 3200 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine
    --split 949,50,1 --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234
    --train-samples 9 --checkpoint-activations --no-async-tensor-model-parallel-allreduce --deepspeed
    --deepspeed_config ds.json --zero-stage 0 --no-pipeline-parallel --deepspeed-activation-checkpointing""",
    """--train-samples 9 --init-method-std 0.013 --fp16 --initial-loss-scale 2048 --min-loss-scale 1
    --loss-scale-window 500 --hysteresis 2 --lr 2e-4 --min-lr 1e-6 --lr-decay-style cosine --lr-decay-samples 20000
    --lr-warmup-samples 200 --weight-decay 0.1 --adam-beta2 0.95 --split 949,50,1""",
    {
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 11,
        },
        "wall_clock_breakdown": False,
    },
)
DEEPSPEED = (  # tests/model/Megatron_GPT2/ds_config_func_bs8_zero2.json, head
    "--lr 1e-3 --deepspeed-config ds.json",
    """--lr 1e-3 --fp16 --initial-loss-scale 4294967296 --loss-scale-window 1000 --hysteresis 2 --min-loss-scale 1
    --zero-stage 2""",
    {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7000000, "reduce_scatter": True},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True},
    },
)
MINDFORMERS = (  # configs/gpt2/pretrain_gpt2_small_fp16.yaml, v1.5.0
    "--config c.yaml --pad-vocab-size-to 256",
    """--pad-vocab-size-to 256 --no-flash-attn --seed 0 --fp16 --loss-scale-window 1000 --lr 1e-4 --min-lr 1e-5
    --lr-decay-style linear --weight-decay 0.1 --adam-beta2 0.95 --no-adam-bias-correction""",
    {
        "seed": 0,
        "run_mode": "train",
        "runner_config": {"batch_size": 1, "sink_mode": True},
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "scale_sense": {"loss_scale_value": 4294967296, "scale_factor": 2, "scale_window": 1000},
            "use_clip_grad": True,
        },
        "moe_config": {"expert_num": 1, "capacity_factor": 1.05},
        "model": {
            "model_config": {
                "type": "GPT2Config",
                "hidden_act": "gelu",
                "expand_ratio": 4,
                "use_flash_attention": False,
                "hidden_dropout_rate": 0.1,
                "attention_dropout_rate": 0.1,
                "softmax_compute_type": "float32",
                "compute_dtype": "float16",
            },
            "arch": {"type": "GPT2LMHeadModel"},
        },
        "lr_schedule": {"type": "polynomial", "learning_rate": 1e-4, "lr_end": 1e-5, "warmup_steps": 0},
        "optimizer": {"type": "FusedAdamWeightDecay", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
    },
)
CORE_MS = (  # tests/st/test_distri_core/test_optimizer_param_scheduler/test_iteration_tarining.yaml, feature-0.1
    "--config c.yaml --pad-vocab-size-to 256",
    """--pad-vocab-size-to 256 --untie-embeddings-and-output-weights --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
    --lr-decay-iters 1320000 --lr-warmup-iters 2000 --weight-decay 0.1""",
    {
        "training_config": {"epochs": 10, "training_iters": 100, "loss_scale_factor": 2, "loss_reduction": "mean"},
        "parallel_config": {"recv_dtype": "float32", "model_customize_staged": False},
        "model_config": {
            "vocab_size": 256,
            "compute_dtype": "float32",
            "flatten_labels_and_input_mask": True,
            "untie_embeddings_and_output_weights": True,
        },
        "dataset_config": {"batch_size": 1, "micro_batch_num": 2},
        "optimizer_config": {
            "learning_rate": 3e-4,
            "lr_decay_iters": 1320000,
            "lr_warmup_iters": 2000,
            "lr_decay_samples": 0,
            "min_lr": 3e-5,
            "lr_decay_style": "cosine",
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.1,
            "weight_decay_incr_style": "constant",
        },
    },
)


def losses(words: str) -> list[float]:
    """Three steps of the model that these options describe, cut."""
    cut = CUT.replace("--train-iters 3", "--train-samples 6") if "samples" in words else CUT
    trainer, _ = build(parse([*words.split(), *cut.split()], {}))
    return [trainer.step().loss for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "theirs",
    [MEGATRON_LM, MEGATRON_DEEPSPEED, MINDSPEED_LLM, MINDFORMERS, CORE_MS, DEEPSPEED],
    ids=["Megatron-LM", "Megatron-DeepSpeed", "MindSpeed-LLM", "MindFormers", "MindSpeed-Core-MS", "DeepSpeed"],
)
def test_losses_are_those_of_hals_own_options(
    theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_ref: Any
) -> None:
    words, ours, *content = theirs
    monkeypatch.chdir(tmp_path)
    if content:
        Path("c.yaml").write_text(yaml.safe_dump(content[0]))
        Path("ds.json").write_text(json.dumps(content[0]))
    assert losses(words) == losses(ours)
