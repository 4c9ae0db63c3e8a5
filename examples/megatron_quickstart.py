"""megatron-core's quickstart on any backend: a GPT in two tensor-parallel shards, five steps, a checkpoint.

    hal launch --backend cpu_ref --nproc-per-node 2 examples/megatron_quickstart.py --save CKPT
    hal launch --backend cpu_ref --nproc-per-node 4 examples/megatron_quickstart.py --load CKPT

The code inside `with hal_device()` is megatron-core's quickstart as in its documentation.
`--spec hal` runs the same model on HAL's ops.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import torch

import hal
from hal.model.megatron import hal_device, join_world

SEQUENCE, VOCABULARY = 64, 100


def build_model(spec):
    """The quickstart's GPT, with two layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    if spec == "hal":
        from hal.model.megatron import gpt_layer_spec as layer
    else:
        layer = get_gpt_layer_local_spec()
    return GPTModel(config, layer, VOCABULARY, SEQUENCE)


class Tokenizer:
    """The part of a tokenizer that a dataset of numbers needs."""

    def __init__(self) -> None:
        self.vocab_size, self.eod = VOCABULARY, VOCABULARY - 1
        self.unique_identifiers = {"class": "Tokenizer"}


def batches():
    """Batches of megatron-core's mock dataset, the same on every rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=SEQUENCE,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=Tokenizer(),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, None, None], lambda: True, config).build()
    order = torch.Generator().manual_seed(0)
    return iter(torch.utils.data.DataLoader(train, batch_size=8, shuffle=True, generator=order))


def forward_step(device, data, model):
    """One microbatch: the step function that megatron-core's schedules call."""
    batch = {name: value.to(device) for name, value in next(data).items()}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])

    def loss(mask, losses):
        mean = (losses.float().view(-1) * mask.view(-1)).sum() / mask.sum()
        return mean, {"lm loss": mean.item()}

    return output, partial(loss, batch["loss_mask"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="folder for the checkpoint")
    parser.add_argument("--load", type=Path, help="folder of a checkpoint to start from")
    parser.add_argument("--spec", choices=("local", "hal"), default="local", help="layers of megatron-core or of HAL")
    options = parser.parse_args()
    join_world()
    with hal_device():
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        torch.manual_seed(123)
        model_parallel_cuda_manual_seed(123)
        device = hal.device(hal.backend().local_index())
        model = build_model(options.spec).to(device)
        if options.load:
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(prefix=""), str(options.load)))
        optimizer = torch.optim.Adam(model.parameters())
        run, data = get_forward_backward_func(), batches()
        for step in range(5):
            optimizer.zero_grad()
            losses = run(
                forward_step_func=partial(forward_step, device),
                data_iterator=data,
                model=model,
                num_microbatches=1,
                seq_length=SEQUENCE,
                micro_batch_size=8,
                forward_only=options.load is not None,
            )
            if options.load is None:
                optimizer.step()
            if rank == 0:
                print(f"step {step}: loss {losses[0]['lm loss']:.6f}", flush=True)
        if options.save:
            if rank == 0:
                options.save.mkdir(parents=True, exist_ok=True)
            torch.distributed.barrier()
            dist_checkpointing.save(model.sharded_state_dict(prefix=""), str(options.save))
            again = build_model(options.spec).to(device)
            again.load_state_dict(dist_checkpointing.load(again.sharded_state_dict(prefix=""), str(options.save)))
            same = all(map(torch.equal, model.parameters(), again.parameters()))
            if rank == 0:
                print(f"saved and loaded: {'the same' if same else 'DIFFERENT'}", flush=True)
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":  # saving a checkpoint starts processes that import this file
    main()
