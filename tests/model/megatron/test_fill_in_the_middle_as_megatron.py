"""--fim-data against GPTFIMDataset of Megatron-LM, given the same random numbers for each sample."""

import importlib.util
import types

import numpy
import pytest
from megatron_lm import CHECKOUT, needs_checkout

from hal.model.config.schema import Config
from hal.model.data.fill_in_the_middle import Rearrangement
from hal.model.data.tokenizers.tokenizer import ByteTokenizer

TOKENS = {f"fim_{name}_token": token for name, token in zip(("prefix", "middle", "suffix", "pad"), "\1\2\3\4")}


@pytest.mark.parametrize("options", [{}, {"fim_split_sample": "#", "fim_fragment_rate": 0.7, "fim_no_prefix": "ab"}])
def test_samples_equal_megatrons(options):
    pytest.importorskip("megatron.core")
    spec = importlib.util.spec_from_file_location("fim_dataset", CHECKOUT / "megatron/training/datasets/fim_dataset.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config, tokenizer = Config(fim_data=True, **TOKENS, **options), ByteTokenizer()
    ours = Rearrangement(config, tokenizer, 0)
    theirs = module.GPTFIMDataset.__new__(module.GPTFIMDataset)
    theirs.fim_rate, theirs.fim_spm_rate = config.fim_rate, config.fim_spm_rate
    theirs.fragment_fim_rate, theirs.no_fim_prefix = config.fim_fragment_rate, config.fim_no_prefix
    theirs.fim_split_sample = ours.separator
    theirs.prefix_tok_id, theirs.middle_tok_id, theirs.suffix_tok_id, theirs.pad_tok_id = 1, 2, 3, 4
    theirs.eod_tok_id = tokenizer.eod
    text = types.SimpleNamespace(ids_to_text=lambda ids: tokenizer.decode([*ids]), text_to_ids=tokenizer.encode)
    theirs.config = types.SimpleNamespace(tokenizer=types.SimpleNamespace(_tokenizer=text))
    theirs.shuffle_index = theirs.document_index = numpy.arange(200)

    random, changed = numpy.random.default_rng(0), 0
    for n in range(200):
        sample = random.choice([*b"abcd#", tokenizer.eod], 80, p=[0.22, 0.22, 0.22, 0.22, 0.06, 0.06])
        theirs.sample_index = {n: (n, 0), n + 1: (n, len(sample) - 1)}
        theirs.dataset = types.SimpleNamespace(get=lambda *_, sample=sample, **__: sample)
        theirs.np_rng = numpy.random.RandomState([config.seed, 0, n])
        right, _ = theirs._query_document_sample_shuffle_indices(n)
        result = ours(sample, n)
        assert result.tolist() == right.tolist(), n
        changed += result.tolist() != sample.tolist()
    assert changed > 100


pytestmark = needs_checkout()
