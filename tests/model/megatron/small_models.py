"""megatron-core's GPTModel, small, on its own layers, split into the pipeline stages of the layout."""

import zlib

import torch

LAYERS, VOCABULARY, LENGTH = 4, 32, 8


def config(**given):
    from megatron.core.transformer.transformer_config import TransformerConfig

    base = {
        "num_layers": LAYERS,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }
    return TransformerConfig(**{**base, **given})


def chunks(model_config):
    """This stage's GPTModels, with weights that depend only on parameter names and layers."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    models = []
    for stage in range(ps.get_virtual_pipeline_model_parallel_world_size() or 1):
        model = GPTModel(
            model_config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        for name, parameter in named(model):
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=draw) + ("norm.weight" in name)
        models.append(model)
    return models


def named(model):
    """Parameters by the names that they have in an unsplit model."""
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            head, layers, local, rest = name.split(".", 3)
            name = f"{head}.{layers}.{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
        yield name, parameter
