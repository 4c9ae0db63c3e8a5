# The cells of the notebook on tensor parallelism among this project's sources, as they are, except that the world is 4
# (there 8, TP2 x PP4) and that megatron-core 0.16.1 has another constructor of MockGPTDataset: see the end.
import os
from functools import partial

import megatron.core.parallel_state as ps
import megatron.core.tensor_parallel.utils as util
import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.data import broadcast_data
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.optim import Adam


class Utils:
    world_size = torch.cuda.device_count()
    rank = int(os.environ["LOCAL_RANK"])

    @staticmethod
    def initialize_distributed():
        print(f"Initializing torch.distributed with rank: {Utils.rank}, world_size: {Utils.world_size}")
        torch.cuda.set_device(Utils.rank % torch.cuda.device_count())
        init_method = "tcp://"
        master_ip = os.getenv("MASTER_ADDR", "localhost")
        master_port = os.getenv("MASTER_PORT", "6000")
        init_method += master_ip + ":" + master_port
        torch.distributed.init_process_group(
            backend="nccl", world_size=Utils.world_size, rank=Utils.rank, init_method=init_method
        )

    @staticmethod
    def destroy_model_parallel():
        ps.destroy_model_parallel()
        torch.distributed.barrier()

    @staticmethod
    def initialize_model_parallel(
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        pipeline_model_parallel_split_rank=None,
    ):
        ps.destroy_model_parallel()
        if not torch.distributed.is_initialized():
            Utils.initialize_distributed()
        ps.initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size,
            pipeline_model_parallel_split_rank,
        )


def test_broadcast_data():
    Utils.initialize_model_parallel(2, 2)
    input_data = {n: torch.ones((8, 8)).cuda() * float(n) for n in range(8)}
    dtype = torch.float32
    actual_output = broadcast_data([0, 1], input_data, dtype)
    assert torch.equal(actual_output[0], input_data[0])
    assert torch.equal(actual_output[1], input_data[1])

    if Utils.rank == 0:
        print("Broadcast assertion passed")
    Utils.destroy_model_parallel()


def test_gather_split_1d_tensor():
    rank = Utils.rank
    Utils.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    input_tensor = torch.ones((2, 4)).cuda() * rank
    actual_output_tensor = util.gather_split_1d_tensor(input_tensor)
    if rank % 2 == 0:
        expected_output_tensor = torch.concat((input_tensor.flatten(), input_tensor.flatten() + 1))
    else:
        expected_output_tensor = torch.concat((input_tensor.flatten() - 1, input_tensor.flatten()))
    assert torch.equal(actual_output_tensor, expected_output_tensor)
    print("gathered")
    Utils.destroy_model_parallel()


def model_provider():
    """Build the model."""

    transformer_config = TransformerConfig(
        num_layers=2, hidden_size=12, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )

    gpt_model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=100,
        max_sequence_length=64,
    )

    return gpt_model


def forward_step_func(data_iterator, model):
    def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor):
        losses = output_tensor.float()
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss}

    data = next(data_iterator)
    tokens = data["tokens"].to(device)
    attention_mask = data["attention_mask"].to(device)
    position_ids = data["position_ids"].to(device)
    labels = data["labels"].to(device)
    loss_mask = data["loss_mask"].to(device)

    output_tensor = model(tokens, position_ids, attention_mask, labels=labels)

    return output_tensor, partial(loss_func, loss_mask)


def save_distributed_checkpoint(checkpoint_path, gpt_model):
    sharded_state_dict = gpt_model.sharded_state_dict(prefix="")
    dist_checkpointing.save(sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path)


def load_distributed_checkpoint(checkpoint_path, gpt_model):
    sharded_state_dict = gpt_model.sharded_state_dict(prefix="")
    checkpoint = dist_checkpointing.load(sharded_state_dict=sharded_state_dict, checkpoint_dir=checkpoint_path)
    gpt_model.load_state_dict(checkpoint)
    return gpt_model


def get_train_data_iterator():
    """Not the notebook's: the keys and shapes of its MockGPTDataset, which this megatron-core builds otherwise."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.ones(8, 1, 64, 64, dtype=torch.bool).triu(1)
    while True:
        text = torch.randint(0, 100, (8, 65), generator=draw)
        yield {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": torch.ones(8, 64),
            "attention_mask": mask,
            "position_ids": torch.arange(64).expand(8, 64),
        }


if __name__ == "__main__":
    test_broadcast_data()
    test_gather_split_1d_tensor()
    Utils.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    model_parallel_cuda_manual_seed(123)

    gpt_model = model_provider()
    device = torch.device("cuda")
    gpt_model.to(device)

    optim = Adam(gpt_model.parameters())

    train_iterator = get_train_data_iterator()

    forward_backward_func = get_forward_backward_func()

    for _ in range(5):
        optim.zero_grad()

        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=gpt_model,
            num_microbatches=1,
            seq_length=64,
            micro_batch_size=8,
            decoder_seq_length=64,
            forward_only=False,
        )

        optim.step()

        print(f"Losses reduced :{losses_reduced}")

    os.makedirs("ckpt", exist_ok=True)
    save_distributed_checkpoint(gpt_model=gpt_model, checkpoint_path="ckpt")
    gpt_model = load_distributed_checkpoint(gpt_model=gpt_model, checkpoint_path="ckpt")
    gpt_model.to(device)
    print("Successfully loaded the model")
