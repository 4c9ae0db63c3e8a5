"""Documents within a sequence: Megatron's masks and positions, and a model that keeps them separate."""

import itertools

import numpy
import pytest
import torch

from hal.model.config.command_line import build
from hal.model.data.gpt_dataset import Split
from hal.model.gpt.model import GPT
from hal.model.parallel import document_mask
from hal.model.parallel.document_mask import Documents
from hal.model.training.trainer import make_trainer

EOD, VOCABULARY = 9, 50


def sequences(*shape):
    """Random ids of which about one in six ends a document, also at the start, at the end and twice in a row."""
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    ids[torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.17] = EOD
    ids[0, 0] = ids[0, -1] = ids[0, 5] = ids[0, 6] = EOD
    return ids


def test_positions_and_masks_are_megatrons():
    from hal.model.data.megatron_datasets import gpt_dataset

    tokens = sequences(6, 23)
    starts = document_mask.starts(tokens, EOD)
    causal = torch.ones(23, 23, dtype=torch.bool).triu(1)
    labels = Split([{"tokens": t, "labels": t} for t in tokens], VOCABULARY, EOD, mask_loss=True).fetch(0, 6)[1]
    for n, row in enumerate(tokens):
        mask, loss_mask, positions = gpt_dataset()._get_ltor_masks_and_position_ids(row, EOD, True, True, True, True)
        assert torch.equal(document_mask.positions(starts)[n], positions)
        assert torch.equal(Documents.of(starts, starts.device).mask()[n, 0] | causal, mask[0])
        assert torch.equal(labels[n] != document_mask.IGNORED, loss_mask.bool())


def model(references, **options):
    base = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 24,
        "init_method_std": 0.3,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCABULARY,
        "data_path": "unused",
    }
    config = build({**base, **options})
    return GPT(config, torch.device("cpu")).eval()


@pytest.mark.parametrize(
    "shape", [{}, {"position_embedding_type": "rope", "num_query_groups": 1}], ids=["gpt2", "rope"]
)
@pytest.mark.parametrize("path", [{}, {"use_flash_attn": False}, {"pre_tokens": 3}], ids=["flash", "softmax", "window"])
def test_a_document_computes_what_it_would_alone(references, shape, path):
    gpt = model(references, reset_position_ids=True, reset_attention_mask=True, **shape, **path)
    tokens = sequences(2, 24)
    starts = document_mask.starts(tokens, EOD)
    together = gpt(tokens, starts=starts)
    assert not torch.allclose(together, gpt(tokens), atol=1e-3)  # the mask has an effect
    for b in range(2):
        edges = [*starts[b].unique().tolist(), 24]
        for first, end in itertools.pairwise(edges):
            separate = gpt(tokens[b : b + 1, first:end])
            torch.testing.assert_close(together[first:end, b], separate[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", ["reset_position_ids", "reset_attention_mask"])
def test_each_option_does_its_part_alone(references, given):
    gpt, both = (
        model(references, **{given: True}),
        model(references, reset_position_ids=True, reset_attention_mask=True),
    )
    tokens = sequences(1, 24)
    starts = document_mask.starts(tokens, EOD)
    one, plain, all_ = gpt(tokens, starts=starts), gpt(tokens), both(tokens, starts=starts)
    assert not torch.allclose(one, plain, atol=1e-3) and not torch.allclose(one, all_, atol=1e-3)


def test_the_loss_is_the_mean_over_what_counts(references):
    gpt = model(references, eod_mask_loss=True)
    tokens = sequences(3, 24)
    logits = gpt(tokens)
    labels = tokens.roll(-1, 1)
    counted = tokens != EOD
    per_token = torch.nn.functional.cross_entropy(
        logits[..., : VOCABULARY + 1 + 77].permute(1, 2, 0), labels, reduction="none"
    )
    expected = per_token[counted].mean()
    torch.testing.assert_close(gpt.loss(logits, labels.masked_fill(~counted, document_mask.IGNORED)), expected)
    assert gpt.loss(logits, torch.full_like(labels, document_mask.IGNORED)) == 0.0


class Samples:
    """A dataset in which the first of every two samples consists mostly of end-of-document ids."""

    def __len__(self):
        return 100

    def __getitem__(self, n):
        ids = torch.from_numpy(numpy.random.default_rng(n).integers(0, VOCABULARY, 25))
        ids[: 20 * (n % 2)] = EOD
        return {"tokens": ids[:-1], "labels": ids[1:]}


def test_microbatches_with_few_tokens_that_count_weigh_less(references):
    """The step equals that of one large microbatch, although the small ones average over different token counts."""
    results = []
    for size in (1, 4):
        gpt = model(
            references,
            eod_mask_loss=True,
            micro_batch_size=size,
            global_batch_size=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        split = Split(Samples(), VOCABULARY, EOD, True)
        trainer = make_trainer(gpt.config, {"train": split, "valid": split})
        results.append((trainer.evaluate(), *[(s.loss, s.grad_norm) for s in (trainer.step(), trainer.step())]))
    assert numpy.allclose(results[0][0], results[1][0], rtol=1e-6)
    numpy.testing.assert_allclose(results[0][1:], results[1][1:], rtol=1e-5)
