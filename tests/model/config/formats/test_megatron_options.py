"""Options of other trainers: the table against HAL's schema, translations, and reports of all problems at once."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hal.cli import main
from hal.model.config.command_line import GROUPS, build, convert, parse, parser, read
from hal.model.config.formats.megatron_options import CLASSES, TABLE, table
from hal.model.config.schema import Config, ConfigError
from hal.model.config.show import describe
from hal.model.config.validation import check_given, split_proportions

FIELDS = {f.name for f in fields(Config) if f.init}
FLAGS = {flag for action in parser()._actions for flag in action.option_strings}


def problem(line):
    with pytest.raises(ConfigError) as caught:
        parse(line.split(), {})
    return str(caught.value)


def test_every_row_has_a_class_a_target_that_exists_and_a_reason():
    lines = TABLE.read_text().splitlines()[1:]
    assert len(lines) == len(table()) > 1200, "no option is there twice"
    for row in table().values():
        option, _, value = row.name.partition(" ")
        assert row.kind in CLASSES and row.sources and re.fullmatch(r"[\w-]+( \w+)?", row.name)
        assert row.takes in ("", "1", "+", "?") or row.takes.isdigit()
        if row.kind == "implemented":
            assert f"--{row.name}" in FLAGS, "an implemented option is an option"
        elif value:
            assert table()[option].kind == "implemented" and not row.takes
            with pytest.raises(ConfigError, match="choose one of"):
                convert(option.replace("-", "_"), value, "a value of HAL's option needs no row")
        else:
            assert f"--{row.name}" not in FLAGS, "an option of HAL is not translated again"
        if row.kind == "translated":
            targets = [t.partition("=")[0] for t in row.target.replace(";", " ").split()]
            assert targets and all(t.startswith("@") or t in FIELDS for t in targets)
        if row.kind in ("noted", "refused"):
            assert row.reason


def test_reasons_point_to_options_that_exist():
    named = {f"--{word}" for row in table().values() for word in re.findall(r"--([a-z][\w-]+)", row.reason)}
    known = FLAGS | {f"--{name}" for name, row in table().items() if row.kind != "refused"}
    assert named <= known | {"--use-megatron-fsdp"}


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("--batch-size 8", "--micro-batch-size 8"),
        (
            "--gelu-tanh --post-norm --query-pre-attn-scalar 64 --interleave-sliding-window 5 --add-rmsnorm-offset "
            "--input-embeds-norm --hidden-size 256",
            "--geglu --gelu-approximate tanh --use-sandwich-norm --softmax-scale 0.125 --pre-tokens 4 "
            "--window-attn-skip-freq 2 --apply-layernorm-1p --embedding-multiplier-scale 16 --hidden-size 256",
        ),
        (
            "--seq-length 8 --train-samples 9000 --train-tokens 80 --lr-decay-tokens 40 --lr-warmup-tokens 16",
            "--seq-length 8 --train-samples 10 --lr-decay-samples 5 --lr-warmup-samples 2",
        ),
        ("--seq-length 8 --train-samples 5 --train-tokens 80", "--seq-length 8 --train-samples 5"),
        ("--seq-length 8 --train-samples 5 --train-tokens 1_600", "--seq-length 8 --train-samples 5"),
        (
            "--seq-length 8 --global-batch-size 4 --train-iters 2 --train-tokens 80",
            "--seq-length 8 --global-batch-size 4 --train-samples 8",
        ),
        ("--num-layers 4 --scale-depth 1.5", "--num-layers 4 --residual-multiplier 0.75"),
        ("--hidden-size 512 --dim-model-base 256", "--hidden-size 512 --output-multiplier-scale 0.5"),
        (
            "--position-embedding-type yarn --yarn-original-max-position-embeddings 128 --rotary-scaling-factor 32.0 "
            "--yarn-beta-fast 16 --yarn-correction-range-round-to-int",
            "--position-embedding-type rope --rope-type yarn --original-max-position-embeddings 128 "
            "--rotary-scaling-factor 32 --beta-fast 16",
        ),
        (
            "--position-embedding-type rope --use-glm-rope --rotary-percent 0.5",
            "--position-embedding-type rope --rotary-interleaved --rotary-percent 0.5",
        ),
        ("--num-experts 4 4 --disable-bias-linear", "--num-experts 4 --disable-bias-linear"),
        ("--sparse-mode 4 --pre-tokens 3", "--pre-tokens 3"),
        ("--batch_size=8", "--micro-batch-size 8"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--recompute-activations", "--recompute-granularity selective"),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        ),
        (
            "--activations-checkpoint-method block",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        ),
        ("--no-bias-gelu-fusion", "--gelu-approximate none"),
        ("--no-bias-gelu-fusion --swiglu", "--swiglu"),
        ("--disable-bias-linear", "--disable-bias-linear --gelu-approximate none"),
        ("--quick-geglu", "--geglu --gelu-approximate fast"),
        ("--window-size (128,0)", "--pre-tokens 128"),
        ("--attention-backend unfused", "--no-flash-attn"),
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration --attention-dropout 0 --hidden-dropout 0",
            "--cuda-graphs --attention-dropout 0 --hidden-dropout 0",
        ),
        (
            "--cuda-graph-impl full_iteration --attention-dropout 0 --hidden-dropout 0",
            "--cuda-graphs --attention-dropout 0 --hidden-dropout 0",
        ),
        ("--padded-vocab-size 512", "--pad-vocab-size-to 512"),
        ("--vocab-file v --merge-file m", "--vocab-file v --merge-file m --tokenizer-type GPT2BPETokenizer"),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path d",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model d",
        ),
        (
            "--rope-scaling-type llama3 --position-embedding-type rope",
            "--use-rope-scaling --position-embedding-type rope",
        ),
        (
            "--kv-channels 8 --rope-scaling-type longrope --longrope-freqs-type outer --long-factor 2,2,3,4 "
            "--short-factor 1,1,1.5,2 --rope-scaling-original-max-position-embeddings 512 "
            "--max-position-embeddings 2048 --position-embedding-type rope",
            "--kv-channels 8 --rope-type longrope --rotary-scaling-factor 4 --long-factor 2,2,3,4 "
            "--short-factor 1,1,1.5,2 --original-max-position-embeddings 512 "
            "--max-position-embeddings 2048 --position-embedding-type rope",
        ),
        (
            "--multi-head-latent-attention --qk-nope-head-dim 16 --qk-rope-head-dim 8 --rope-scaling-type yarn "
            "--rope-scaling-factor 40 --rope-scaling-mscale-all-dim 1 --rope-scaling-beta-fast 16 "
            "--rope-scaling-original-max-position-embeddings 512 --position-embedding-type rope",
            "--multi-latent-attention --qk-head-dim 16 --qk-pos-emb-head-dim 8 --rotary-scaling-factor 40 "
            "--mscale-all-dim 1 --beta-fast 16 --original-max-position-embeddings 512 --position-embedding-type rope",
        ),
    ],
)
def test_a_translation_is_the_same_as_hals_own_options(theirs, ours):
    one, other = (parse(line.split(), {}) for line in (theirs, ours))
    assert {f: getattr(one, f) for f in FIELDS} == {f: getattr(other, f) for f in FIELDS}


def test_a_split_may_have_quotes_as_in_megatron():
    assert split_proportions("'99,1,0'") == [99, 1, 0] and split_proportions("949, 50,.5") == [949, 50, 0.5]
    assert split_proportions("90,x,1") == split_proportions("1,,2") == split_proportions("1e3,-1,0") == []


@pytest.mark.parametrize(
    "options, counts",
    [
        ("--num-layers 10 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", [2, 3, 3, 2]),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            [3, 4, 4, 3],
        ),
        (
            "--num-layers 6 --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            [0, 1, 1, 1, 1, 1, 1, 0],
        ),
        ("--num-layers 8 --pipeline-model-parallel-layout Et*2|t*3|t|t*2L", [2, 3, 1, 2]),
        ("--num-layers 6 --pipeline-model-parallel-layout E|(t|)*6L", [0, 1, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_uneven_stages_become_a_list_of_layers(options, counts, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = parse([*options.split(), "--pipeline-model-parallel-size", "4", "--global-batch-size", "16"], {})
    assert [int(n) for n in config.num_layer_list] == counts


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--sparse-mode 4 --pre-tockens 64", {"pre_tokens": 64}),
        ("--sparse-mode 0 --pre-tockens 64", {"pre_tokens": 64}),
        ("--sparse-mode 2 --pre-tockens 64", {"pre_tokens": None}),
        ("--fp16 --fp16-lm-cross-entropy", {"fp16": True}),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", {"ulysses_degree_in_cp": 2}),
        ("--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 4", {"context_parallel_algo": "hybrid"}),
        ("--cp-comm-type a2a --hierarchical-context-parallel-sizes 2 4", {"ulysses_degree_in_cp": None}),
        ("--seq-length 2048 --lr-warmup-tokens 375000000 --train-tokens 300000000000", {"lr_warmup_samples": 183105}),
        ("--is-x-model --hidden-size 64", {"geglu": True, "ffn_hidden_size": 128, "gelu_approximate": "none"}),
        ("--is-x-model --ffn-hidden-size 64", {"ffn_hidden_size": 32}),
        ("--checkpoint-activations --checkpoint-in-cpu --partition-activations", {"checkpoint_in_cpu": True}),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp", {"cuda_graphs": False}),
        ("--cuda-graph-impl local --cuda-graph-modules attn mlp", {"cuda_graphs": False}),
    ],
)
def test_what_decides_how_and_where_but_not_what(options, expected, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    given = [*options.split(), "--global-batch-size", "32"]
    if "cp" in options:
        given += ["--context-parallel-size", "8", "--num-attention-heads", "8"]
    config = parse(given, {})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "options, words",
    [
        ("--sparse-mode 7", "7: 0 and 4 are the window"),
        ("--fp16-lm-cross-entropy", "it needs --fp16, as in Megatron"),
        ("--seq-length 2048 --lr-warmup-tokens 3000", "3000 tokens are not whole sequences"),
        ("--num-experts 4 4 8 --disable-bias-linear", "--num-experts 4 4 8: all layers have the same"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "needs --ulysses-degree-in-cp"),
        ("--cuda-graph-impl graph", "'graph' is not one of none, local, transformer_engine"),
        ("--cuda-graph-impl full_iteration --cuda-graph-modules attn", "remove --cuda-graph-modules attn"),
        (
            "--rope-scaling-type longrope --max-position-embeddings 64",
            "give --max-position-embeddings and --rope-scaling-original-max-position-embeddings",
        ),
        (
            "--rope-scaling-type longrope --rope-scaling-original-max-position-embeddings 64",
            "give --max-position-embeddings and --rope-scaling-original-max-position-embeddings",
        ),
        (
            "--position-embedding-type yarn --no-yarn-correction-range-round-to-int",
            "--no-yarn-correction-range-round-to-int: the range of channels is always rounded outwards",
        ),
        ("--position-embedding-type mrope", "--position-embedding-type mrope: the model is a GPT of texts"),
        ("--tokenizer-type TikTokenizer", "--tokenizer-type TikTokenizer: tiktoken's files are not read; write them"),
        ("--suspend-timeout 3", "`hal generate` samples from a model"),
        ("--train-weighted-split-paths GIVEN:1", "--train-weighted-split-paths GIVEN:1: read the data with one of"),
    ],
)
def test_and_what_is_wrong_about_it(options, words, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert words in problem(options)


def test_noted_options_are_listed_once_with_their_reason(capsys):
    config = parse(["--no-masked-softmax-fusion", "--DDP-impl", "local", "--num-workers", "4"], {})
    assert list(config.noted) == ["--no-masked-softmax-fusion", "--DDP-impl", "--num-workers"]
    shown = "\n".join(describe(config, GROUPS))
    assert shown.count("--DDP-impl: there is one implementation of data parallelism") == 1


def test_an_option_at_its_trainers_default_is_accepted_and_other_values_are_refused():
    assert parse(["--optimizer", "adam", "--mtp-num-layers", "0"], {}).noted
    assert "--optimizer sgd: the optimizer is AdamW" in problem("--optimizer sgd")


DEEPSEEK = "--num-experts 8 --num-layers 6 --disable-bias-linear --moe-router-topk 2 --moe-ffn-hidden-size 48 "


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("--first-k-dense-replace 2", "--moe-layer-freq [0]*2+[1]*4"),
        ("--first-k-dense-replace 1 --moe-layer-freq 2", "--moe-layer-freq [0,0,1,0,1,0]"),
        ("--first-k-dense-replace -1 --moe-layer-freq -1", ""),
        ("--first-k-dense-replace 0 --moe-layer-freq 2", "--moe-layer-freq 2"),
        ("--n-shared-experts 2", "--moe-shared-expert-intermediate-size 96"),
        ("--n-shared-experts 2 --moe-shared-expert-intermediate-size 32", "--moe-shared-expert-intermediate-size 32"),
        ("--moe-token-dispatcher-type alltoall_seq", "--moe-token-dispatcher-type alltoall"),
        (
            "--moe-router-load-balancing-type none --seq-aux --moe-aux-loss-coeff 0.1",
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        ),
        ("--moe-router-load-balancing-type aux_loss --seq-aux", ""),
        (
            "--moe-router-load-balancing-type softmax_topk",
            "--moe-router-load-balancing-type none --moe-router-pre-softmax",
        ),
        ("--moe-router-load-balancing-type softmax_topk --norm-topk-prob", "--moe-router-load-balancing-type none"),
        ("--moe-router-pre-softmax --norm-topk-prob", ""),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax"),
        (
            "--moe-router-load-balancing-type pai_megatron_aux_loss --moe-router-topk-scaling-factor 2 "
            "--moe-router-num-groups 4 --moe-router-group-topk 2",
            "--moe-router-pre-softmax",
        ),
    ],
)
def test_mindspeeds_names_of_experts(theirs, ours):
    def options(line):
        config = parse((DEEPSEEK + line).split(), {})
        layers = [config.has_experts(n) for n in range(6)]
        return {**config.__dict__, **dict.fromkeys(("given", "origins", "notes", "noted", "moe_layer_freq"))}, layers

    assert options(theirs) == options(ours)


def test_mindspeeds_names_of_experts_in_a_file(tmp_path):
    line = "moe-layer-freq: 2\nfirst-k-dense-replace: 3\nmoe-router-load-balancing-type: softmax_topk\n"
    (tmp_path / "c.yaml").write_text(line + "num_experts: 8\nnum_layers: 6\ndisable_bias_linear: true\n")
    config = parse(["--config", str(tmp_path / "c.yaml")], {})
    assert [config.has_experts(n) for n in range(6)] == [False] * 4 + [True, False]
    assert config.moe_router_load_balancing_type == ("none",) and config.moe_router_pre_softmax


def test_tensor_parallel_ranks_with_experts_of_their_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --moe-tp-extend-ep"
    config = parse((DEEPSEEK + line).split(), {})
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 1)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("--moe-router-load-balancing-type group_limited_greedy --topk-group 2", "chooses groups by their best expert"),
        ("--moe-router-load-balancing-type sparsemixer_topk", "draws the second expert at random"),
        ("--norm-topk-prob --moe-router-topk-scaling-factor 2", "--moe-router-topk-scaling-factor, which then has no"),
        ("--first-k-dense-replace 1 --moe-layer-freq [1]*6", "names the dense layers, too"),
        ("--num-nextn-predict-layers 1 --recompute-mtp-norm", "there is no multi-token prediction"),
    ],
)
def test_experts_of_mindspeed_that_are_not_available(line, reason):
    text = problem(DEEPSEEK + line)
    assert reason in text and "\n" not in text, "nothing else is wrong"


def test_names_of_experts_in_a_dense_model_are_noted():
    line = "--first-k-dense-replace 1 --n-shared-experts 1 --seq-aux --norm-topk-prob --moe-tp-extend-ep"
    assert list(parse(line.split(), {}).noted) == line.replace(" 1", "").split()


def test_names_of_float8():
    options = "--bf16 --fp8-hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max --fp8-interval 2"
    config = parse(options.split(), {})
    assert (config.fp8_format, config.fp8_recipe, config.fp8_amax_history_len) == ("hybrid", "delayed", 16)
    assert list(config.noted) == ["--fp8-interval"]
    text = problem("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8")
    assert "--fp8-recipe mxfp8: products have one scale per tensor or per 128 elements" in text
    (note,) = parse([*["--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], "--fp8-margin", "1"], {}).notes
    assert note == "--fp8-margin 1 has no effect: it needs --fp8-format with --fp8-recipe delayed"


def test_all_problems_are_reported_at_once_by_kind():
    text = problem(
        "--hidden-sise 64 --fp8-format hybrid --num-experts 8 --moe-latent-size 4 --moe-token-dropping "
        "--num-layers many --batch-size 2 --micro-batch-size 4"
    )
    kinds = ["unknown:", "cannot be followed", "wrong values and contradictions:"]
    assert [text.index(kind) for kind in kinds] == sorted(text.index(kind) for kind in kinds)
    assert "Did you mean --hidden-size?" in text and "--num-layers: expected int, found 'many'" in text
    assert "--moe-latent-size 4, --moe-token-dropping: this variant of a mixture of experts" in text
    assert "contradict each other about --micro-batch-size: 2 and 4" in text
    several = problem("--optimizer sgd --fp16 --bf16 --min-lr 1 --lr 0.1 --seq-length 8 --max-position-embeddings 4")
    for words in ("--optimizer sgd", "--fp16 and --bf16", "above --lr", "longer than --max-position-embeddings"):
        assert words in several, "contradictions are found beside refused options"


def test_unknown_names_get_no_wrong_hints():
    assert "Did you mean" not in problem("--frobnicate 3")


def test_options_of_other_trainers_in_a_file(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(
        "batch-size: 2\nno-masked-softmax-fusion: true\ntransformer_impl: local\ncheckpoint-activations: true\n"
    )
    config = parse(["--config", str(path)], {})
    assert config.micro_batch_size == 2 and config.recompute_granularity == "full"
    assert list(config.noted) == ["no-masked-softmax-fusion", "transformer_impl"]
    assert main(["config", "show", "--config", str(path), "--num-experts", "4", "--moe-latent-size", "2"]) == 2
    assert "this variant of a mixture of experts is not available" in capsys.readouterr().err


FACTS = yaml.safe_load((Path(__file__).parents[3] / "fixtures" / "command_lines.yaml").read_text())


@pytest.mark.parametrize("fact", FACTS, ids=[fact["source"] for fact in FACTS])
def test_command_lines_of_real_scripts(fact, monkeypatch):
    """Each resolves, or is explained by exactly the reasons that it should be."""
    if fact["processes"]:
        monkeypatch.setenv("WORLD_SIZE", str(fact["processes"]))
    else:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    values = read(shlex.split(fact["options"]), {}, showing=True)
    if not fact["refused"]:
        config = build(values, check_given)
        for name in ("num_layers", "hidden_size", "lr", "seq_length"):
            given = re.search(rf"--{name.replace('_', '-')} (\S+)", fact["options"])
            assert given is not None and getattr(config, name) == float(given[1])
        return
    with pytest.raises(ConfigError) as caught:
        build(values, check_given)
    texts = [problem.text for problem in caught.value.problems]
    assert len(texts) == len(fact["refused"])
    assert all(any(reason in text for text in texts) for reason in fact["refused"])


def test_values_have_the_same_names_in_files(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("position-embedding-type: yarn\nyarn-beta-fast: 16\ncontext-parallel-algo: ulysses_cp_algo\n")
    config = parse(["--config", str(file)], {})
    assert (config.position_embedding_type, config.rope_type, config.beta_fast) == ("rope", "yarn", 16.0)
    assert config.context_parallel_algo == "ulysses"
    file.write_text("tokenizer-type: TikTokenizer\nfp8-recipe: custom\nbf16: true\nfp8-format: e4m3\n")
    text = problem(f"--config {file}")
    assert "tokenizer-type TikTokenizer: tiktoken's files" in text and "fp8-recipe custom: products have one" in text
