"""The production tier: the references pass it, and errors that begin at some size fail, with the place named."""

import pytest
import torch
from planted import plant

import hal
from hal import ops
from hal.testing import run
from hal.testing.production import blocks, check, early_reads
from hal.testing.production.cases import cases
from hal.testing.production.check import check_production


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    """What is planted here works before it returns, so no result can change later (test_late_results.py)."""
    monkeypatch.setattr(early_reads, "PATIENCE", 0.0)


def rows(backend, op, dtype=torch.float32):
    return list(check_production(backend, [op], dtypes=[dtype], reduced=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(hal.OPS))
def test_a_reference_passes(name):
    op = hal.OPS[name]
    rows = check_production(plant(op, op.reference), [op], reduced=True)
    assert {row.status for row in rows if row.implementation == "planted/wrong"} == {"pass"}


def norm_of_512_channels(x, weight, eps):
    scale = torch.rsqrt(x[..., :512].float().square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight).to(x.dtype)


def doubled_beyond_row_1024(x, weight, bias, eps):
    y = ops.layer_norm.reference(x, weight, bias, eps)
    return torch.cat([y[:1024], 2 * y[1024:]])


def gradient_without_the_last_rows(x, weight, eps):
    count = len(x) - len(x) % 64
    first = ops.rms_norm.reference(x[:count], weight, eps)
    return torch.cat([first, ops.rms_norm.reference(x[count:], weight.detach(), eps)])


def without_the_last_of_more_than_256_keys(q, k, v, **rest):
    if rest["layout"] != "BNSD" or k.shape[2] <= 256 or rest["next_tokens"] is not None:
        return ops.flash_attention.reference(q, k, v, **rest)
    return ops.flash_attention.reference(q, k[:, :, :-1], v[:, :, :-1], **rest)


def rounded_between_tiles(x, weight, bias):
    """Adds products of 32 columns in the dtype of x."""
    total = torch.zeros(*x.shape[:-1], len(weight), dtype=x.dtype) + bias
    for start in range(0, x.shape[-1], 32):
        tile = slice(start, start + 32)
        total = total + (x[..., tile] @ weight[:, tile].t())
    return total


def ids_below_1024_rows(weight, ids, vocab_start, comm):
    return ops.embedding.reference(weight, ids % 1024, vocab_start=vocab_start, comm=comm)


def draw_repeats_after_32768(x, p, rng):
    flat, draw = x.reshape(-1), ops.philox_uniform.reference(x.shape, rng).reshape(-1)
    repeated = draw[torch.arange(len(draw)) % 32768]
    return torch.where(repeated >= p, flat / (1 - p), torch.zeros_like(flat)).view(x.shape)


def steps_on_the_first_4096(params, grads, exp_avgs, exp_avg_sqs, **rest):
    lists = [[t[:4096] for t in tensors] for tensors in (params, grads, exp_avgs, exp_avg_sqs)]
    copies = rest.pop("model_params")
    ops.adamw.reference(*lists, model_params=copies and [t[:4096] for t in copies], **rest)


def bias_without_the_last_gradient(x, bias):
    return ops.swiglu.reference(x, bias if bias is None else torch.cat([bias[:-1], bias[-1:].detach()]))


def first_head_everywhere(q, k, v, **rest):
    if rest["layout"] == "TND":
        k, v = (x[:, :1].expand_as(x) for x in (k, v))
    return ops.flash_attention.reference(q, k, v, **rest)


def keys_without_gradient(q, k, v, **rest):
    return ops.flash_attention.reference(q, torch.cat([k[..., :-1, :], k[..., -1:, :].detach()], -2), v, **rest)


def last_output_is_not_added(x, dy, main_grad, main_bias_grad):
    ops.linear_wgrad.reference(x, dy[:, :-1], main_grad[:-1], main_bias_grad[:-1])


def repeated_draw(shape, rng, device):
    flat = ops.philox_uniform.reference(shape, rng, device=device).reshape(-1)
    return flat[torch.arange(len(flat)) % 32768].view(shape)


def repeated_ids_count_once(weight, ids, vocab_start, comm):
    y = ops.embedding.reference(weight, ids, vocab_start=vocab_start, comm=comm)
    first = torch.tensor([i == 0 or bool((ids[:i] != ids[i]).all()) for i in range(len(ids))])
    return torch.where(first[:, None], y, y.detach())


def classes_below_8192(logits, target, **rest):
    part = logits.detach().clone()
    part[:, 8192:] = -1e4
    return ops.cross_entropy.reference(
        logits if logits.shape[1] <= 8192 else logits - logits.detach() + part, target, **rest
    )


def angles_repeat_after_512(x, cos, sin, layout, interleaved):
    at = torch.arange(len(x)) % 512
    return ops.rotary.reference(x, cos[at], sin[at], layout=layout, interleaved=interleaved)


def columns_below_2048(x, mask, scale, causal):
    masked = torch.arange(x.shape[-1]) >= 2048
    return ops.scale_mask_softmax.reference(x, masked.view(1, 1, 1, -1), scale, causal)


def sees_the_first_4096(grads, inv_scale):
    ops.unscale_and_check.reference(grads, inv_scale)
    return ops.unscale_and_check.reference([g[:4096].clone() for g in grads], 1.0)


def experts_below_256(logits, topk, **rest):
    return ops.moe_router.reference(logits[:, :48], topk, **{**rest, "expert_bias": rest["expert_bias"][:48],
        "num_groups": 6}) if logits.shape[1] > 48 else ops.moe_router.reference(logits, topk, **rest)  # fmt: skip


def rows_below_256(x, indices, num_experts, probs, capacity):
    rows, *rest = ops.permute.reference(x, indices, num_experts, probs=probs, capacity=capacity)
    return torch.cat([rows[:256], rows[256:] * 2]), *rest


def rows_of_the_first_1024(rows, row_map, probs):
    return ops.unpermute.reference(rows, torch.where(row_map < 1024, row_map, -1), probs=probs)


def groups_of_at_most_128_rows(x, weight, group_sizes):
    y = ops.grouped_linear.reference(x, weight, group_sizes)
    end = int(group_sizes[0])
    return torch.cat([y[:128], 2 * y[128:end], y[end:]]) if end > 128 else y


def gradient_of_at_most_128_rows(x, weight, group_sizes):
    y = ops.grouped_linear.reference(x, weight, group_sizes)
    return torch.cat([y[:128], y[128:].detach()])


def last_rows_are_not_added(x, dy, group_sizes, main_grad):
    ops.grouped_linear_wgrad.reference(x, torch.cat([dy[:-8], 0 * dy[-8:]]), group_sizes, main_grad)


def doubled_beyond_row_1024_of_experts(x, probs):
    y = ops.grouped_swiglu.reference(x, probs)
    return torch.cat([y[:1024], 2 * y[1024:]])


def eps_of_1024_rows(x, weight, eps):
    first, rest = (ops.rms_norm.reference(part, weight, e) for part, e in ((x[:1024], eps), (x[1024:], 1e-30)))
    return torch.cat([first, rest])


def softmax_without_subtraction(x, mask, scale, causal):
    if mask is not None or causal or x.shape[-1] <= 1024:
        return ops.scale_mask_softmax.reference(x, mask, scale, causal)
    e = (x.float() * scale).exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def mask_of_256_columns(x, mask, scale, causal):
    if mask is not None and mask.shape[-1] > 256:
        mask = torch.cat([mask[..., :256], torch.zeros_like(mask[..., 256:])], -1)
    return ops.scale_mask_softmax.reference(x, mask, scale, causal)


def loss_without_subtraction(logits, target, **rest):
    if logits.shape[-1] <= 1024 or rest["label_smoothing"]:
        return ops.cross_entropy.reference(logits, target, **rest)
    return logits.float().exp().sum(-1).log() - logits.gather(-1, target[:, None])[:, 0].float()


def no_smoothing_of_many_classes(logits, target, **rest):
    few = logits.shape[-1] <= 1024
    return ops.cross_entropy.reference(logits, target, **(rest if few else {**rest, "label_smoothing": 0.0}))


def interleaved_is_wrong_in_large_calls(x, cos, sin, layout, interleaved):
    y = ops.rotary.reference(x, cos, sin, layout=layout, interleaved=interleaved)
    if interleaved and x.numel() > 1 << 15:
        y = y * (torch.arange(y.shape[-1]) % 2 == 0)
    return y


def mask_of_256_keys(q, k, v, mask=None, **rest):
    if mask is not None and mask.shape[-1] > 256:
        mask = torch.cat([mask[..., :256], torch.zeros_like(mask[..., 256:])], -1)
    return ops.flash_attention.reference(q, k, v, mask=mask, **rest)


def lse_of_more_than_256_keys(q, k, v, **rest):
    result = ops.flash_attention.reference(q, k, v, **rest)
    return (result[0], result[1] + 1.0) if rest["return_lse"] and k.shape[2] > 256 else result


def first_queries_of_the_last_head(q, k, v, **rest):
    """The tail tile of a head writes over the first rows of the next one, behind the first key/value head."""
    y = ops.flash_attention.reference(q, k, v, **rest)
    if rest["layout"] != "BNSD" or isinstance(y, tuple) or q.shape[2] <= 256:
        return y
    y = y.clone()
    y[-1, -1, :4] = y[-1, -2, -4:]
    return y


def first_queries_of_further_batch_entries(q, k, v, **rest):
    y = ops.flash_attention.reference(q, k, v, **rest)
    if rest["layout"] == "TND" or isinstance(y, tuple):
        return y
    b, s = rest["layout"].index("B"), rest["layout"].index("S")
    if y.shape[b] == 1 or y.shape[s] <= 256:
        return y
    y = y.clone()
    y.narrow(b, 1, y.shape[b] - 1).narrow(s, 0, 8).zero_()
    return y


def heads_of_another_layout(q, k, v, **rest):
    """SBND read as if the batch and the tokens were exchanged in long calls."""
    y = ops.flash_attention.reference(q, k, v, **rest)
    long = rest["layout"] == "SBND" and q.shape[0] > 256
    return y.transpose(0, 1).reshape(y.shape) if long else y


def no_last_head_in_bsnd(q, k, v, **rest):
    y = ops.flash_attention.reference(q, k, v, **rest)
    if rest["layout"] == "BSND" and q.shape[1] > 256:
        y = torch.cat([y[:, :, :-1], y[:, :, -1:] * 0], 2)
    return y


FAULTS = [
    (ops.rms_norm, eps_of_1024_rows, torch.float32, "100,000 rows: the output, rows"),
    (ops.scale_mask_softmax, softmax_without_subtraction, torch.float32, "32768 keys, logits of 1,000: the output"),
    (ops.scale_mask_softmax, mask_of_256_columns, torch.bfloat16, "mask, 4096 tokens: the output"),
    (ops.cross_entropy, loss_without_subtraction, torch.float32, "vocabulary of 152064, logits of 100: the output"),
    (ops.cross_entropy, no_smoothing_of_many_classes, torch.float32, "vocabulary of 152064, label smoothing: the ou"),
    (ops.rotary, interleaved_is_wrong_in_large_calls, torch.float32, "interleaved, 32768 tokens: the output"),
    (ops.flash_attention, mask_of_256_keys, torch.float32, "mask, SBND, 2048 tokens, heads of 64: the output"),
    (
        ops.flash_attention,
        lse_of_more_than_256_keys,
        torch.float32,
        "their log-sum-exp, 4096 tokens, heads of 256: out",
    ),
    (
        ops.flash_attention,
        first_queries_of_the_last_head,
        torch.float32,
        "latent attention, 4096 tokens, heads of 192 and 128: the output, queries 0 to 7 of",
    ),
    (
        ops.flash_attention,
        first_queries_of_further_batch_entries,
        torch.float32,
        "a bias of every head, 2048 tokens, heads of 64: the output, queries 0 to 7 of",
    ),
    (ops.flash_attention, heads_of_another_layout, torch.float32, "mask, SBND, 2048 tokens, heads of 64: the output"),
    (ops.flash_attention, no_last_head_in_bsnd, torch.float32, "causal, BSND, 4096 tokens, heads 8 over 2"),
    (ops.moe_router, experts_below_256, torch.float32, "8 of 256 experts in 8 groups: output 1, rows"),
    (ops.permute, rows_below_256, torch.float32, "64 experts, hidden 1024: output 0, everything"),
    (ops.unpermute, rows_of_the_first_1024, torch.float32, "hidden 4096: the output, tokens"),
    (ops.grouped_linear, groups_of_at_most_128_rows, torch.float32, "4096 to 1408: the output, columns"),
    (ops.grouped_linear, gradient_of_at_most_128_rows, torch.float32, "4096 to 1408: the gradient of weight, columns"),
    (ops.grouped_linear_wgrad, last_rows_are_not_added, torch.float32, "16384 rows: main_grad, written in place, col"),
    (ops.grouped_swiglu, doubled_beyond_row_1024_of_experts, torch.float32, "100,000 rows: the output, rows"),
    (ops.swiglu, bias_without_the_last_gradient, torch.float32, "the gradient of bias, columns 9 to 16 of 17"),
    (ops.flash_attention, first_head_everywhere, torch.float32, "packed sequences: the "),
    (
        ops.flash_attention,
        keys_without_gradient,
        torch.float32,
        "latent attention, 4096 tokens, heads of 192 and 128: the gradient of k, all keys of batch entry",
    ),
    (ops.linear_wgrad, last_output_is_not_added, torch.float32, "8192 tokens: main_grad, written in place, rows 32"),
    (ops.philox_uniform, repeated_draw, torch.float32, "100,000 rows: the output, rows"),
    (ops.embedding, repeated_ids_count_once, torch.float32, "the gradient of weight, the last rows that ids name"),
    (ops.cross_entropy, classes_below_8192, torch.float32, "vocabulary of 152064, label smoothing: the output"),
    (ops.rotary, angles_repeat_after_512, torch.float32, "32768 tokens: the output, rows"),
    (ops.scale_mask_softmax, columns_below_2048, torch.float32, "32768 keys, logits of 1,000: the output, rows"),
    (ops.unscale_and_check, sees_the_first_4096, torch.float32, "infinity in the last element: the output, the flag"),
    (ops.rms_norm, norm_of_512_channels, torch.float32, "hidden 4096: the output, rows 0 to 7 of 70"),
    (ops.layer_norm, doubled_beyond_row_1024, torch.float32, "100,000 rows: the output, rows"),
    (ops.rms_norm, gradient_without_the_last_rows, torch.float32, "the gradient of weight, all rows"),
    (
        ops.flash_attention,
        without_the_last_of_more_than_256_keys,
        torch.float32,
        "all keys with their log-sum-exp, 4096 tokens",
    ),
    (ops.linear, rounded_between_tiles, torch.bfloat16, "sums of 16384: the output, rows"),
    (ops.embedding, ids_below_1024_rows, torch.float32, "vocabulary of 152064: the output, ids"),
    (ops.dropout, draw_repeats_after_32768, torch.float32, "100,000 rows: the output, rows"),
    (ops.adamw, steps_on_the_first_4096, torch.float32, "params[1], written in place, rows"),
]


@pytest.mark.parametrize("op, function, dtype, text", FAULTS)
def test_an_error_that_begins_at_some_size_is_named(op, function, dtype, text, monkeypatch):
    # Only the call that is to fail, if the text names it, because the references of the others take most of the time.
    named = [case for case in cases() if case.op == op.name and text.split(": ")[0] in case.name]
    monkeypatch.setattr(check, "cases", lambda: named or cases())
    (row,) = rows(plant(op, function), op, dtype)
    assert row.status == "fail" and text in row.message, row.message


def test_sums_over_several_parts_are_complete(monkeypatch):
    monkeypatch.setattr(blocks, "CHUNK", 1000)
    (row,) = rows(plant(ops.rms_norm, ops.rms_norm.reference), ops.rms_norm)
    assert row.status == "pass"
    (row,) = rows(plant(ops.rms_norm, gradient_without_the_last_rows), ops.rms_norm)
    assert "the gradient of weight, all rows" in row.message


def test_a_call_that_every_implementation_refuses_is_reported():
    backend = plant(ops.swiglu, ops.swiglu.reference, why_not=lambda call: ["narrow"] if call.x.shape[-1] < 100 else [])
    first, second = rows(backend, ops.swiglu)
    assert (first.status, first.samples) == ("pass", 1)
    assert second.status == "not run" and second.implementation is None
    assert second.reasons == ["100,000 rows: refused by every implementation (narrow)"]


@pytest.mark.parametrize("wrong", [lambda y: y[:-1], lambda y: y.double(), lambda y: (y, y)])
def test_results_of_another_form_are_failures(wrong):
    backend = plant(ops.dropout, lambda **arguments: wrong(ops.dropout.reference(**arguments)))
    (row,) = rows(backend, ops.dropout)
    assert row.status == "fail" and "the reference gives {'the output': 'torch.float32 (1600, 43)'}" in row.message
    assert row.code == "hal parity --backend planted --op dropout --scale production --seed 0"


def test_an_unknown_scale_is_refused():
    with pytest.raises(hal.HalError, match="no scale 'large'; scales: default, production"):
        run(plant(ops.l2norm, ops.l2norm.reference), ops=["l2norm"], scale="large")


def test_every_op_has_cases_in_every_dtype_of_its_tolerances():
    covered = {(case.op, dtype) for case in cases() for dtype in case.in_dtypes() if case.reduced is not None}
    assert covered == {(op.name, dtype) for op in hal.OPS.values() for dtype in op.tol}


def test_offsets_beyond_2_to_the_31_are_mandatory():
    names = {case.op for case in cases() if case.name == "beyond 2^31 elements"}
    assert names == {"rms_norm", "layer_norm", "dropout", "rotary", "scale_mask_softmax", "cross_entropy"}
    (adamw,) = (case for case in cases() if case.name == "beyond 2^31 bytes")
    assert adamw.op == "adamw" and 4 * adamw.sample.args[0][0].shape[0] > 1 << 31


def test_a_call_without_memory_is_reported_as_not_run():
    backend = plant(ops.swiglu, ops.swiglu.reference)
    backend.memory_stats = lambda: {"free": 1000}
    (row,) = rows(backend, ops.swiglu)
    assert (row.status, row.samples) == ("not run", 0)
    assert "100,000 rows: needs about" in str(row) and "0.0 GB are free" in str(row)


def test_refused_calls_are_declined_with_their_reasons():
    backend = plant(ops.swiglu, ops.swiglu.reference, why_not=lambda call: ["more than 2 rows"])
    (row,) = rows(backend, ops.swiglu)
    assert (row.status, row.reasons) == ("declined", ["more than 2 rows"])


def test_an_exception_of_an_accepted_call_is_a_failure():
    def raises(x, bias):
        raise RuntimeError("out of shared memory")

    (row,) = rows(plant(ops.swiglu, raises), ops.swiglu)
    assert row.message.count("accepted the call and raised RuntimeError: out of shared memory") == 2


def test_simulators_run_the_reduced_calls():
    sizes = []

    def recorded(tensors):
        sizes.extend(len(t) for t in tensors)
        return ops.l2norm.reference(tensors)

    backend = plant(ops.l2norm, recorded)
    backend.simulated = True
    assert {row.status for row in check_production(backend, [ops.l2norm])} == {"pass"}
    assert set(sizes) == {3, 40, 35_000}


@pytest.mark.parametrize("stated, status", [(True, "not run"), (False, "declined")])
def test_dropout_in_attention_may_be_refused_by_a_backend_that_says_so(monkeypatch, stated, status):
    refusing = plant(
        ops.flash_attention,
        ops.flash_attention.reference,
        why_not=lambda call: ["dropout"] if call.dropout_p > 0.0 else [],
    )
    chosen = [c for c in cases() if c.op == "flash_attention" and c.name in ("dropout, 2048 tokens", "SBH, batch of 2")]
    assert len(chosen) == 2
    monkeypatch.setattr(check, "cases", lambda: chosen)
    monkeypatch.setattr(refusing, "capabilities", lambda: hal.Capabilities(attention_dropout=stated))
    first, second = rows(refusing, ops.flash_attention)
    assert (first.status, first.samples, second.status) == ("pass", 1, status)
    assert second.reasons == ["dropout, 2048 tokens: refused by every implementation (dropout)"]
