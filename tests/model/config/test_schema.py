"""Options come from three sources with a fixed precedence; invalid or unused options give a one-line error."""

import dataclasses
import types
import typing

import pytest

from hal.model.config.command_line import parse, parser, read_config
from hal.model.config.schema import READY, Config, ConfigError, GivenOptions, ready_configuration, resolve

DOCUMENTED = """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups seq-length
    max-position-embeddings micro-batch-size global-batch-size train-iters lr min-lr lr-decay-style lr-warmup-iters
    weight-decay clip-grad seed bf16 fp16 attention-dropout hidden-dropout swiglu normalization
    position-embedding-type rotary-base untie-embeddings-and-output-weights recompute-granularity recompute-method
    recompute-num-layers tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size
    num-layers-per-virtual-pipeline-stage context-parallel-size context-parallel-algo expert-model-parallel-size
    use-distributed-optimizer zero-stage overlap-grad-reduce data-path split tokenizer-type vocab-file merge-file
    save load save-interval eval-interval eval-iters log-interval pre-tokens next-tokens pre-tockens next-tockens
    shape-order use-flash-attn no-flash-attn backend simulate fallback pin run-dir text-file config
    nproc-per-node
"""


def problem(*argv, environ=None):
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_command_line_wins_over_yaml_and_yaml_over_the_environment(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num-layers: 3\nhidden_size: 64\nlr: 1e-3\nbf16: true\npin: [linear=a]\n")
    other = tmp_path / "d.yaml"
    other.write_text("no-flash-attn: true\npre_tockens: 9\n")
    config = parse(["--config", str(other)], {})
    assert not config.use_flash_attn and config.pre_tokens == 9
    environ = {"HAL_NUM_LAYERS": "2", "HAL_HIDDEN_SIZE": "32", "HAL_SEQ_LENGTH": "16", "HAL_CACHE_DIR": "x"}
    config = parse(["--config", str(path), "--num-layers", "4"], environ)
    assert (config.num_layers, config.hidden_size, config.seq_length) == (4, 64, 16)
    assert config.lr == 1e-3 and config.bf16 and config.pin == ("linear=a",)
    assert config.given == {"num_layers", "hidden_size", "seq_length", "lr", "bf16", "pin"}


@pytest.mark.parametrize("given", [["--noop-layers", "0,3"], ["--noop-layers", "0", "--noop-layers", "3"]])
def test_lists_are_written_with_commas_or_one_by_one(given):
    assert parse(given, {}).noop_layers == ("0", "3")


def test_every_name_of_the_documented_command_line_is_an_option():
    names = DOCUMENTED.split()
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert {f"--{name}" for name in names} <= flags
    assert "--help" in flags and parser().format_help()


def test_aliases_and_derived_values():
    config = parse(["--pre-tockens", "5", "--next-tockens", "65536", "--swiglu", "--hidden-size", "256"], {})
    assert config.window == (5, 0)  # attention stays causal
    assert config.ffn_hidden_size == 640 and config.num_query_groups == 4 and config.kv_channels == 64
    assert parse(["--next-tokens", "-2"], {}).window == (None, -2)
    assert parse(["--steps", "7"], {}).train_iters == 7


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--hiden-size 3", "no option '--hiden-size'. Did you mean --hidden-size?"),
        ("--num-layers x", "expected int, found 'x'"),
        ("--num-layers 0", "--num-layers must be in 1..100000"),
        ("--pre-tokens 2147483648", "--pre-tokens must be in -2147483648..2147483647"),
        ("--vocab-extra-ids 10000000", "--vocab-extra-ids must be in 0..100000"),
        ("--lr nan", "--lr must be >= 0"),
        ("--lr inf", "--lr must be >= 0"),
        ("--hidden-dropout 1", "in [0, 1)"),
        ("--seq-length 300 --max-position-embeddings 256", "longer than --max-position-embeddings"),
        ("--hidden-size 100 --num-attention-heads 3", "not divisible by --num-attention-heads"),
        ("--num-attention-heads 4 --num-query-groups 3", "not divisible by --num-query-groups"),
        ("--fp16 --bf16", "contradict"),
        ("--swiglu --geglu", "contradict"),
        ("--use-flash-attn --no-flash-attn", "contradict"),
        ("--data-path x --text-file y", "contradict"),
        ("--micro-batch-size 3 --global-batch-size 4", "not divisible by --micro-batch-size"),
        ("--min-lr 1 --lr 0.1", "above --lr"),
        ("--lr-warmup-iters 100", "--lr-warmup-iters 100 must be below"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file"),
        ("--tokenizer-type NullTokenizer --vocab-size 5", "cannot read text"),
        ("--pin linear", "OP=IMPLEMENTATION"),
        ("--split 1,2", "three proportions"),
        ("--pre-tokens -1", "no key visible"),
        ("--vocab-file x", "GPT2BPETokenizer"),
    ],
)
def test_wrong_command_lines(argv, words):
    assert words in problem(*argv.split())


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--rotary-base 500", "--rotary-base 500.0 has no effect: it needs --position-embedding-type rope"),
        ("--gelu-approximate fast --swiglu", "has no effect"),
        (
            "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax True has no effect: it needs --moe-router-score-function softmax",
        ),
        ("--add-qkv-bias", "has no effect"),
        ("--attn-post-norm-scale 0.1", "--use-sandwich-norm"),
        ("--shape-order BSH --no-flash-attn", "has no effect"),
        ("--min-lr 1e-5 --lr-decay-style constant", "has no effect"),
        ("--lr-decay-iters 50 --lr-decay-style constant", "has no effect"),
        ("--loss-scale 8", "needs --fp16"),
        ("--hysteresis 3 --bf16", "--fp16"),
        ("--fp16 --loss-scale 8 --hysteresis 3", "dynamic"),
        ("--recompute-num-layers 2", "--recompute-granularity full"),
        ("--eval-iters 3", "--eval-interval"),
        ("--context-parallel-algo ulysses", "--context-parallel-size"),
    ],
)
def test_options_without_effect_are_noted(argv, words):
    notes = parse(argv.split(), {}).notes
    assert words in notes[0] and len(notes) == 1


@pytest.mark.parametrize(
    "content, words",
    [
        ("num_layer: 3", "Did you mean --num-layers?"),
        ("num_layers: many", "expected int, found 'many'"),
        ("num_layers: 2.5", "expected int"),
        ("bf16: perhaps", "expected bool"),
        ("lr-decay-style: steps", "choose one of"),
        ("num-layers: 2\nnum_layers: 3", "twice"),
        ("- 3", "option: value"),
        ("a: [", "cannot be read"),
    ],
)
def test_wrong_yaml(tmp_path, content, words):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert words in problem("--config", str(path))


@pytest.mark.parametrize("path", sorted(READY.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_ready_configuration_is_found_by_name(path):
    assert ready_configuration(path.stem) == path
    assert read_config(path.stem).values


def test_a_ready_configuration_is_used_by_name_and_the_command_line_wins():
    config = parse(["--config", "llama-70b", "--data-path", "tokens", "--seq-length", "128"], {})
    assert (config.num_layers, config.num_query_groups, config.seq_length) == (80, 8, 128)


def test_other_wrong_sources():
    assert "no ready configuration is called 'llama'; there are: " in problem("--config", "llama")
    assert "no ready configuration" in problem("--config", "..")
    assert "cannot be read" in problem("--config", "absent.yaml")
    assert "HAL_NUM_LAYERS: expected int" in problem(environ={"HAL_NUM_LAYERS": "x"})


def test_every_option_has_help_and_a_known_kind():
    for option in dataclasses.fields(Config):
        if option.init:
            assert option.metadata["help"]


def test_a_config_holds_none_only_where_absence_is_a_value():
    """The type of every field that may be None says so, and the type of a derived field never does."""
    hints = typing.get_type_hints(Config)
    configs = [Config(), *(resolve(read_config(path.stem).values) for path in READY.glob("*.yaml"))]
    for option in dataclasses.fields(Config):
        optional = isinstance(hints[option.name], types.UnionType)
        assert optional or all(getattr(config, option.name) is not None for config in configs)
        assert not (optional and option.metadata.get("rule"))


def test_derived_defaults_do_not_depend_on_each_other():
    """The order of evaluation does not matter: each rule gives the same value before the others have been applied."""
    rules = {o.name: o.metadata["rule"] for o in dataclasses.fields(Config) if o.metadata.get("rule")}
    resolved, bare = Config(), Config()
    for name in rules:
        setattr(bare, name, None)
    assert {name: rule(bare) for name, rule in rules.items()} == {name: getattr(resolved, name) for name in rules}


def test_resolving_keeps_what_was_given_and_where():
    given = GivenOptions()
    given.take({"num_layers": 2}, {"num_layers": "HAL_NUM_LAYERS"})
    given.take({"num_layers": 3}, {"num_layers": "command line"})
    given.notes.append("a note")
    config = resolve(given)
    assert (config.num_layers, config.given) == (3, {"num_layers"})
    assert (config.origins, config.notes) == ({"num_layers": "command line"}, ("a note",))
    given.notes.append("another")
    assert config.notes == ("a note",) and resolve({"num_layers": 3}).origins == {}


def test_the_vocabulary_is_padded_the_same_for_every_layout():
    config = Config(vocab_size=257)
    assert config.padded_vocab_size == 384
