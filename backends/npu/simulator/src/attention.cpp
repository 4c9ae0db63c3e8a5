// Fused attention, following the library's published tiling and kernel sources.
//
// Phase one refuses the calls that the library refuses: dtypes, layouts and head sizes with 161002; what its tiling
// checks (mask shapes per sparse mode, pre/next without a valid block, prefix ranges, TND rows without a key) with
// 561002. Phase two determines, per batch entry, which scores are computed (visited tiles) and which are masked:
//   no mask             everything is visible; mode, pre and next are ignored
//   mode 0, 1           the mask decides element by element; in mode 0 pre/next only skip entire tiles (rows and
//                       columns rounded up to a tile), and nothing is skipped up to eight tiles of keys
//   modes 2, 3, 4, 7, 8 the 2048 x 2048 mask is read along its diagonals, as the kernel does, so that wrong contents
//                       have an effect
//   mode 5              the mask decides element by element, as in mode 1; the prefix is checked for its range only
//                       (the caller's mask is to show: bottom-right causal or the first prefix[b] keys)
//   mode 6              bottom-right causal or the first prefix[b] keys, read through the 3072 x 2048 mask
// A masked score is -FLT_MAX, so a row without a visible key averages V over the visited tiles. With inner_precise = 2,
// or where the tiling detects such rows, their output is zero (with max = -FLT_MAX and sum = FLT_MAX).
//
// The device's tiles have 128 rows and columns. The setting "tile" makes them smaller by default, so that short
// sequences, too, have tiles that are skipped, sums of earlier tiles that are rescaled, and an incomplete last tile.
#include "attention.h"

#include <cfloat>

#include "kernels.h"
#include "constraints.h"

namespace halsim::attention {
namespace {

constexpr int kTiling = 561002;  // ACLNN_ERR_INNER_TILING_ERROR
constexpr int64_t kCompressed = 2048;

[[noreturn]] void refuse(int code, const std::string& text) { throw Refusal{code, "FlashAttentionScore: " + text}; }
void require(bool fine, int code, const std::string& text) {
  if (!fine) refuse(code, text);
}
std::string str(int64_t value) { return std::to_string(value); }
void within(const std::string& what, int64_t n, const limits::Range& range, int code = kTiling) {
  require(range.holds(n), code, what + " must be in " + str(range.least) + ".." + str(range.most) + ", got " + str(n));
}
int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct Call {
  std::string layout;
  int64_t mode, precise, heads, kv_heads, batch, dim, value_dim;
  int64_t pre, next;  // as given
  Ints sq, sk;        // one entry per batch entry
  Ints prefix;
  bool has_mask;
  bool tnd() const { return layout == "TND"; }
  int64_t max_q() const { return sq.empty() ? 0 : *std::max_element(sq.begin(), sq.end()); }
  int64_t max_k() const { return sk.empty() ? 0 : *std::max_element(sk.begin(), sk.end()); }
  bool compressed() const { return mode == 2 || mode == 3 || mode == 4 || mode == 7 || mode == 8; }
  // The batch entry that modes 7 and 8 treat as a band: the last (7) or first (8) with queries.
  int64_t band_entry() const {
    for (int64_t i = 0; i < batch; i++) {
      int64_t entry = mode == 7 ? batch - 1 - i : i;
      if (sq[entry]) return entry;
    }
    return 0;
  }
};

Ints lengths(const Ints& cumulative) {
  Ints result;
  for (size_t i = 0; i < cumulative.size(); i++) result.push_back(cumulative[i] - (i ? cumulative[i - 1] : 0));
  return result;
}

// [heads, tokens, dim] of one batch entry, a view of the caller's tensor.
Tensor entry(const Call& call, const Tensor& x, int64_t b, int64_t heads, const Ints& sizes) {
  if (call.layout == "BSH") return x[b].unflatten(-1, {heads, -1}).transpose(0, 1);
  if (call.layout == "SBH") return x.select(1, b).unflatten(-1, {heads, -1}).transpose(0, 1);
  if (call.layout == "BSND") return x[b].transpose(0, 1);
  if (call.layout == "BNSD") return x[b];
  int64_t start = std::accumulate(sizes.begin(), sizes.begin() + b, int64_t{0});
  return x.narrow(0, start, sizes[b]).transpose(0, 1);
}

// ---- phase one ------------------------------------------------------------------------------------------------

void check_band(const Call& call, int64_t pre, int64_t next) {
  int64_t sq = call.max_q(), sk = call.max_k();
  std::string given = "pre_tokens " + str(call.pre) + " and next_tokens " + str(call.next);
  require(pre >= 0 || next >= 0, kTiling, given + ": there is no valid data block");
  if (pre < 0) require(next >= -pre && -pre < sk, kTiling, given + ": there is no valid data block for Skv " + str(sk));
  if (next < 0) require(-next <= pre && -next < sq, kTiling, given + ": there is no valid data block for Sq " + str(sq));
}

void check_prefix(const Call& call) {
  bool given = call.prefix.size() == static_cast<size_t>(call.batch);
  require(given || call.mode == 5, kTiling, "prefix must have one entry per batch entry");
  const auto& most = call.tnd() ? limits::attention_packed_prefix_batch : limits::attention_prefix_batch;
  within("batch entries with a prefix", call.batch, most);
  for (int64_t b = 0; given && b < call.batch; b++) {
    int64_t low = std::max<int64_t>(call.sk[b] - call.sq[b], 0);
    require(call.prefix[b] >= low && call.prefix[b] <= call.sk[b], kTiling,
            "prefix " + str(call.prefix[b]) + " is not in [" + str(low) + ", " + str(call.sk[b]) + "]");
  }
}

void check_varlen_modes(const Call& call) {
  auto rows_without_key = [&](int64_t b, int64_t next) { return call.sq[b] - next > call.sk[b]; };
  if (call.mode == 0) {
    require(call.next >= 0, kTiling, "next_tokens " + str(call.next) + ": there is no valid data block");
    if (call.pre >= call.max_q() && (call.next == 0 || call.next >= call.max_k())) return;
    for (int64_t b = 0; b < call.batch; b++)
      require(!call.sq[b] || !call.sk[b] || call.sk[b] + call.pre >= call.sq[b], kTiling,
              "batch entry " + str(b) + " has a row without a key: check pre_tokens and next_tokens");
    require(call.pre >= 0 || call.next >= -call.pre, kTiling, "pre_tokens and next_tokens leave no valid data block");
  }
  int64_t band = call.band_entry();
  if (call.mode == 3 || call.mode == 7)
    for (int64_t b = 0; b < call.batch; b++)
      require(call.sq[b] <= call.sk[b], kTiling, "mode 3/7 in TND: batch entry " + str(b) + " has Sq > Skv");
  if (call.mode == 4) {
    require(call.pre >= 0, kTiling, "pre_tokens " + str(call.pre) + " has invalid data blocks");
    require(call.next >= 0 || call.pre + call.next >= 0, kTiling, "pre_tokens and next_tokens do not intersect");
    for (int64_t b = 0; b < call.batch; b++)
      require(!call.sq[b] || !call.sk[b] || !rows_without_key(b, call.next), kTiling,
              "mode 4 in TND: batch entry " + str(b) + " has a row without a key");
  }
  if (call.mode == 7)
    require(call.pre >= call.sk[band] && call.next <= 0 && !rows_without_key(band, call.next), kTiling,
            "mode 7: pre_tokens must reach the last Skv, next_tokens be <= 0 and leave every row a key");
  if (call.mode == 8)
    require(call.pre >= call.sk[band] && !rows_without_key(band, call.next), kTiling,
            "mode 8: pre_tokens must reach the first Skv and next_tokens leave every row a key");
}

void check_mask(const Call& call, const Tensor& mask) {
  require(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte, kTiling, "atten_mask must be bool or uint8");
  auto size = mask.sizes();
  int64_t sq = call.max_q(), sk = call.max_k();
  auto ends_with = [&](int64_t rows, int64_t columns) {
    return size.size() >= 2 && size[size.size() - 2] == rows && size[size.size() - 1] == columns;
  };
  std::string shape = "atten_mask " + c10::str(size) + " in sparse_mode " + str(call.mode) + ": ";
  require(size.size() == 2 || size.size() == 4, kTiling, shape + "2 or 4 dimensions are supported");
  if (size.size() == 4)
    require((size[0] == 1 && size[1] == 1) || (size[0] == call.batch && (size[1] == 1 || size[1] == call.heads)), kTiling,
            shape + "[B,N,Sq,Skv], [B,1,Sq,Skv] and [1,1,Sq,Skv] are supported");
  if (call.compressed())
    require(ends_with(kCompressed, kCompressed) && size.size() == 2, kTiling, shape + "[2048,2048] is required");
  else if (call.mode == 6)
    require(ends_with(3072, 2048) && size.size() == 2, kTiling, shape + "[3072,2048] is required");
  else
    require(ends_with(sq, sk), kTiling, shape + "[..., " + str(sq) + ", " + str(sk) + "] is required");
  if (call.mode == 5)
    require(size.size() == 4 && (size[0] == call.batch || call.batch == 1), kTiling, shape + "[B,N,Sq,Skv] or [B,1,Sq,Skv]");
}

// attention.slopes of constraints.csv.
void check_slopes(const Call& call, const Tensor& pse) {
  std::string shape = "pse " + c10::str(pse.sizes()) + " of ALiBi: ";
  require(pse.scalar_type() == at::kFloat, kInvalid, shape + "float32 is required");
  bool fits = (pse.dim() == 1 && pse.size(0) == call.heads) || pse.sizes() == at::IntArrayRef({call.batch, call.heads});
  require(fits, kTiling, shape + "[N] or [B,N] is required");
  // attention.slopes_lengths of constraints.csv.
  require(call.sq == call.sk, kTiling, shape + "Sq and Skv must be equal");
}

// attention.pse and attention.packed_pse_modes of constraints.csv.
void check_pse(const Call& call, const Tensor& pse) {
  std::string shape = "pse " + c10::str(pse.sizes()) + ": ";
  if (call.tnd()) {
    require(call.mode != 7 && call.mode != 8, kTiling, shape + "sparse_mode 7 and 8 take none");
    for (int64_t length : call.sq) require(length, kTiling, shape + "none is supported with a sequence of length 0");
    return;
  }
  int64_t sq = call.max_q(), sk = call.max_k();
  require(pse.dim() == 4, kTiling, shape + "4 dimensions are supported");
  bool batch = pse.size(0) == call.batch || pse.size(0) == 1;
  bool rows = pse.size(2) == sq || (pse.size(2) == 1 && pse.size(0) == call.batch);
  require(batch && pse.size(1) == call.heads && pse.size(3) == sk && rows, kTiling,
          shape + "[B,N,Sq,Skv], [B,N,1,Skv] and [1,N,Sq,Skv] are simulated (the library also takes the last 1024 rows)");
}

// attention.statistics and attention.packed_statistics of constraints.csv.
void check_statistics(const Call& call, const Tensor& q, const Tensor& x, const char* name) {
  int64_t tokens = q.size(0);
  bool fits = call.tnd() ? x.dim() == 3 && x.size(2) == 8 && x.numel() == tokens * call.heads * 8
                         : x.sizes() == at::IntArrayRef({call.batch, call.heads, call.max_q(), 8});
  require(fits, kTiling, std::string(name) + " " + c10::str(x.sizes()) + (call.tnd() ? ": [T,N,8]" : ": [B,N,Sq,8]") + " is required");
}

Call check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& drop,
           const Tensor& padding, const Tensor& mask, const Ints& prefix, Ints lengths_q, Ints lengths_k, double keep,
           int64_t pre, int64_t next, int64_t heads, const std::string& layout, int64_t precise, int64_t mode,
           const Added& added) {
  auto type = q.scalar_type();
  bool slopes = added.pse_type == kSlopes || added.pse_type == kSlopesOfRoots;
  require(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat, kInvalid, "query must be float16, bfloat16 or float32");
  require(type == k.scalar_type() && type == v.scalar_type(), kInvalid, "query, key and value must have one dtype");
  require(added.pse_type >= kMulAdd && added.pse_type <= kSlopesOfRoots, kTiling, "pse_type " + str(added.pse_type));
  require(pse.defined() || added.pse_type == kAddMul, kTiling, "pse_type " + str(added.pse_type) + " needs pse");
  require(added.starts_q.empty() && added.starts_k.empty(), kTiling, "q_start_idx and kv_start_idx are not simulated");
  require(!pse.defined() || slopes || pse.scalar_type() == type, kInvalid, "pse must have the dtype of query");
  require(!padding.defined(), kInvalid, "padding_mask is not supported");
  require(heads > 0, kInvalid, "head_num must be > 0, got " + str(heads));
  bool varlen = !lengths_q.empty();
  bool three = layout == "BSH" || layout == "SBH" || layout == "TND", four = layout == "BSND" || layout == "BNSD";
  require(varlen ? layout == "TND" : (three || four) && layout != "TND", kInvalid, "input_layout " + layout);
  int64_t wanted = four ? 4 : 3;
  require(q.dim() == wanted && k.dim() == wanted && v.dim() == wanted, kInvalid,
          "input_layout " + layout + " needs " + str(wanted) + " dimensions");

  Call call{layout, mode, precise, heads, 0, 0, 0, 0, pre, next, {}, {}, prefix, mask.defined()};
  int64_t batch_axis = layout == "SBH" ? 1 : 0;
  int64_t sequence_axis = layout == "SBH" ? 0 : layout == "BNSD" ? 2 : 1;
  int64_t head_axis = layout == "BNSD" || layout == "TND" ? 1 : 2;
  if (layout == "BSH" || layout == "SBH") {
    require(q.size(2) % heads == 0 && q.size(2) > 0, kTiling, "H " + str(q.size(2)) + " is not a multiple of head_num " + str(heads));
    call.dim = q.size(2) / heads;
    require(k.size(2) % call.dim == 0 && k.size(2) > 0, kTiling, "the H of key is not a multiple of D " + str(call.dim));
    call.kv_heads = k.size(2) / call.dim;
    call.value_dim = v.size(2) / call.kv_heads;
  } else {
    require(q.size(head_axis) == heads, kTiling, "head_num is " + str(heads) + ", query has " + str(q.size(head_axis)));
    call.dim = q.size(-1);
    call.kv_heads = k.size(head_axis);
    call.value_dim = v.size(-1);
    require(k.size(-1) == call.dim, kInvalid, "query and key must have the same D");
  }
  // attention.value_size of constraints.csv.
  require(call.value_dim <= call.dim, kInvalid, "the D of value must not exceed the D of key");
  within("D", call.dim, limits::attention_head_size, kInvalid);
  require(call.kv_heads > 0 && heads % call.kv_heads == 0, kTiling, "head_num must be a multiple of the KV heads");
  within("head_num", heads, limits::attention_heads);
  require(keep > 0 && keep <= 1, kTiling, "keep_prob must be in (0, 1]");
  if (varlen) {
    require(lengths_q.size() == lengths_k.size(), kTiling, "actual_seq_qlen and actual_seq_kvlen differ in length");
    within("the number of packed sequences", lengths_q.size(), limits::attention_packed_sequences);
    if (q.numel() && k.numel()) {
      within("T of query", q.size(0), limits::attention_packed_tokens);
      within("T of key", k.size(0), limits::attention_packed_tokens);
    }
    // Zeros at the end stand for batch entries that take no part.
    while (lengths_q.size() > 1 && !lengths_q.back() && !lengths_k.back()) lengths_q.pop_back(), lengths_k.pop_back();
    call.sq = lengths(lengths_q), call.sk = lengths(lengths_k);
    for (size_t b = 0; b < call.sq.size(); b++)
      require(call.sq[b] >= 0 && call.sk[b] >= 0, kTiling, "actual_seq lengths must be cumulative");
    require(lengths_q.back() <= q.size(0) && lengths_k.back() <= k.size(0), kTiling, "actual_seq lengths exceed T");
    call.batch = call.sq.size();
  } else {
    require(q.size(batch_axis) == k.size(batch_axis), kTiling, "query and key differ in batch size");
    require(k.size(batch_axis) == v.size(batch_axis) && k.size(sequence_axis) == v.size(sequence_axis), kTiling,
            "key and value must have the same shape but for D");
    call.batch = q.size(batch_axis);
    call.sq.assign(call.batch, q.size(sequence_axis));
    call.sk.assign(call.batch, k.size(sequence_axis));
    if (q.numel() && k.numel()) {
      within("B", call.batch, limits::attention_batch);
      within("Sq", q.size(sequence_axis), limits::attention_tokens);
      within("Skv", k.size(sequence_axis), limits::attention_tokens);
    }
  }
  require(varlen ? mode >= 0 && mode <= 8 && mode != 5 : mode >= 0 && mode <= 6, kTiling, "sparse_mode " + str(mode));

  if (pse.defined()) slopes ? check_slopes(call, pse) : check_pse(call, pse);
  if (const Tensor& sink = added.sink; sink.defined())  // attention.sink of constraints.csv
    require(sink.scalar_type() == at::kFloat && sink.sizes() == at::IntArrayRef({heads}), kInvalid,
            "sink " + c10::str(sink.sizes()) + ": float32 [N] is required");

  int64_t total = 0;
  for (int64_t b = 0; b < call.batch; b++) total += call.heads * call.sq[b] * call.sk[b];
  if (keep < 1 || drop.defined()) {
    require(keep == 1 || drop.defined(), kNullPointer, "drop_mask is required with keep_prob < 1");
    require(drop.scalar_type() == at::kByte, kTiling, "drop_mask must be uint8");
    require(drop.numel() >= align_up(total, 8) / 8, kTiling, "drop_mask has " + str(drop.numel()) + " bytes, needs " + str(align_up(total, 8) / 8));
  }
  if (!mask.defined() || !total) return call;
  check_mask(call, mask);
  if (call.mode == 5 || call.mode == 6) check_prefix(call);
  if (varlen) {
    check_varlen_modes(call);
  } else if (mode == 0) {
    bool skips_nothing = pre >= call.max_q() && (next == 0 || next >= call.max_k());
    if (!skips_nothing) check_band(call, pre, next);
  } else if (mode == 4) {
    check_band(call, pre + call.max_q() - call.max_k(), next + call.max_k() - call.max_q());
  }
  return call;
}

// ---- phase two ------------------------------------------------------------------------------------------------

// The compressed mask along diagonal x = column - row, clamped to its square.
Tensor diagonal(const Tensor& mask, const Tensor& x) {
  Tensor c = x.clamp(1 - kCompressed, kCompressed - 1);
  return mask.index({(-c).clamp_min(0), c.clamp_min(0)}).to(at::kBool);
}

struct Visible {
  Tensor masked;   // bool, broadcastable to [N, Sq, Sk]; undefined = nothing masked
  Tensor skipped;  // bool [Sq, Sk]: scores the kernel never computes; undefined = none
  bool zero_dead_rows = false;
};

Visible visible(const Call& call, const Tensor& mask, int64_t b) {
  Visible result;
  if (!call.has_mask) return result;
  int64_t sq = call.sq[b], sk = call.sk[b], d = sk - sq;
  Tensor i = at::arange(sq, at::kLong).unsqueeze(1), j = at::arange(sk, at::kLong).unsqueeze(0);
  bool band = call.mode == 4 || (call.mode == 7 || call.mode == 8 ? b == call.band_entry() : false);
  result.zero_dead_rows = call.precise == 2;
  if (band) {
    result.masked = diagonal(mask, j - i - d - call.next).logical_or(diagonal(mask, j - i - d + call.pre + 1).logical_not());
    result.zero_dead_rows |= call.pre - d < -d || call.next + d < 0;
  } else if (call.mode == 2 || call.mode == 8) {
    result.masked = diagonal(mask, j - i);
  } else if (call.mode == 3 || call.mode == 7) {
    result.masked = diagonal(mask, j - i - d);
    result.zero_dead_rows |= d < 0;
  } else if (call.mode == 6) {
    // The upper 2048 x 2048 square is the causal triangle; in the last 1024 rows the left half is 0 and the right half
    // 1, and
// the position of the prefix selects the columns.
    Tensor triangle = diagonal(mask.narrow(0, 0, kCompressed), j - i - d);
    Tensor beyond = (j >= call.prefix[b]).to(at::kLong) * 1024;
    result.masked = triangle.logical_and(mask.index({at::full_like(beyond, kCompressed), beyond}).to(at::kBool));
    result.zero_dead_rows |= call.prefix[b] == 0 && d < 0;
  } else {
    Tensor full = mask.dim() == 2 ? mask.unsqueeze(0) : mask.size(0) == 1 ? mask[0] : mask[b];
    result.masked = full.narrow(-2, 0, sq).narrow(-1, 0, sk).to(at::kBool);
    // attention.packed_mask_rows of constraints.csv.
    TORCH_CHECK(!call.tnd() || !result.masked.all(-1).any().item<bool>(), "atten_mask of packed sequences has a row of ones");
  }
  const int64_t size = kernels::tile();
  if (call.mode != 0 || sk <= 8 * size) return result;
  bool causal = call.pre >= call.max_q() && call.next == 0, all = call.pre >= call.max_q() && call.next >= call.max_k();
  if (all) return result;
  Tensor tile = i.div(size, "floor") * size;
  Tensor end = tile + size + (causal ? 0 : align_up(call.next, size));
  result.skipped = j >= end;
  if (!causal) {
    result.skipped = result.skipped.logical_or(j < tile - align_up(call.pre, size));
    result.zero_dead_rows |= call.pre < -d || call.next < 0;
  }
  return result;
}

// The packed keep bits of batch entry b as a float [N, Sq, Sk] that already holds 1 / keep_prob.
Tensor dropout(const Call& call, const Tensor& drop, double keep, int64_t b) {
  if (!drop.defined()) return {};
  int64_t start = 0, count = call.heads * call.sq[b] * call.sk[b];
  for (int64_t e = 0; e < b; e++) start += call.heads * call.sq[e] * call.sk[e];
  Tensor bits = kernels::unpack_bits(drop.flatten(), start + count).narrow(0, start, count);
  return bits.to(at::kFloat).div(keep).reshape({call.heads, call.sq[b], call.sk[b]});
}

struct Block {
  Tensor q, k, v, score, dead;  // float [N, ., .]; score has -FLT_MAX where masked and -inf where skipped
};

// What is added to the scores of batch entry b after the scale, or, with kAddMul, before it.
Tensor positions(const Call& call, const Tensor& pse, int64_t pse_type, int64_t b) {
  if (pse_type == kMulAdd || pse_type == kAddMul) return (pse.size(0) == 1 ? pse[0] : pse[b]).to(at::kFloat);
  Tensor apart = at::arange(call.sk[b], at::kFloat) - at::arange(call.sq[b], at::kFloat).unsqueeze(1);
  apart = apart.abs();
  if (pse_type == kSlopesOfRoots) apart = apart.sqrt();
  return apart * -(pse.dim() == 1 ? pse : pse[b]).view({-1, 1, 1});
}

Block block(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& mask,
            double scale, int64_t pse_type, int64_t b) {
  int64_t group = call.heads / call.kv_heads;
  auto repeat = [&](const Tensor& x) { return x.repeat_interleave(group, 0).to(at::kFloat); };
  Block out{entry(call, q, b, call.heads, call.sq).to(at::kFloat), repeat(entry(call, k, b, call.kv_heads, call.sk)),
            repeat(entry(call, v, b, call.kv_heads, call.sk)), {}, {}};
  out.score = at::matmul(out.q, out.k.transpose(-1, -2));
  if (pse.defined() && pse_type == kAddMul) out.score.add_(positions(call, pse, pse_type, b));
  out.score.mul_(scale);
  if (pse.defined() && pse_type != kAddMul) out.score.add_(positions(call, pse, pse_type, b));
  Visible visibility = visible(call, mask, b);
  if (visibility.masked.defined()) out.score.masked_fill_(visibility.masked, -FLT_MAX);
  if (visibility.skipped.defined()) out.score.masked_fill_(visibility.skipped, -INFINITY);
  if (visibility.zero_dead_rows) out.dead = std::get<0>(out.score.max(-1, true)).le(-FLT_MAX);
  return out;
}

// Softmax and its product with v, before the division by the sum of the exponentials.
struct Sums {
  Tensor top, total, y;  // maximum [N, Sq, 1], sum of exp(score - maximum) [N, Sq, 1], product [N, Sq, Ev]
};

// Visits the keys tile by tile, as the kernel does: what earlier tiles gave is rescaled when the maximum grows. The
// product takes its operands in `dtype` and accumulates in float. keep: dropout's factors [N, Sq, Sk], or undefined. sink:
// [N], the first logit of every row, whose value is 0; or undefined.
Sums softmax_tiles(const Block& x, const Tensor& keep, const Tensor& sink, at::ScalarType dtype) {
  const int64_t heads = x.q.size(0), rows = x.q.size(1), keys = x.k.size(1), size = kernels::tile();
  Sums sums{at::full({heads, rows, 1}, -INFINITY), at::zeros({heads, rows, 1}), at::zeros({heads, rows, x.v.size(-1)})};
  if (sink.defined()) sums.top.copy_(sink.view({-1, 1, 1})), sums.total.fill_(1);
  for (int64_t begin = 0; begin < keys; begin += size) {
    const int64_t count = std::min(size, keys - begin);
    Tensor score = x.score.narrow(-1, begin, count);
    Tensor top = at::maximum(sums.top, score.amax(-1, true));
    // Rows that have skipped all keys so far have no maximum: their exponentials are 0, not exp(-inf + inf) = NaN.
    Tensor from = top.masked_fill(top.eq(-INFINITY), 0);
    Tensor e = (score - from).exp_(), earlier = (sums.top - from).exp_();
    Tensor p = keep.defined() ? e * keep.narrow(-1, begin, count) : e;
    sums.total = sums.total * earlier + e.sum(-1, true);
    sums.y = sums.y * earlier + at::matmul(p.to(dtype).to(at::kFloat), x.v.narrow(1, begin, count));
    sums.top = top;
  }
  return sums;
}

// The statistics of batch entry b as [N, Sq], from [B,N,Sq,8], from consecutive blocks [N, Sq_b, 8] for TND, or from
// [T,N,8] when the layout of the input is requested.
Tensor statistics(const Call& call, const Tensor& x, const std::string& softmax_layout, int64_t b) {
  if (!call.tnd()) return x[b];
  int64_t start = std::accumulate(call.sq.begin(), call.sq.begin() + b, int64_t{0});
  if (softmax_layout == "same_as_input") return x.narrow(0, start, call.sq[b]).transpose(0, 1);
  return x.flatten().narrow(0, start * call.heads * 8, call.heads * call.sq[b] * 8).view({call.heads, call.sq[b], 8});
}

}  // namespace

Work forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& pse, const Tensor& drop,
             const Tensor& padding, const Tensor& mask, const Ints& prefix, const Ints& lengths_q, const Ints& lengths_k,
             double scale, double keep, int64_t pre, int64_t next, int64_t heads, const std::string& layout,
             int64_t precise, int64_t mode, const std::string& softmax_layout, const Tensor& max, const Tensor& sum,
             const Tensor& out, const Added& added) {
  Call call = check(q, k, v, pse, drop, padding, mask, prefix, lengths_q, lengths_k, keep, pre, next, heads, layout,
                    precise, mode, added);
  return [=] {
    out.zero_();  // rows of TND beyond the last sequence, and every row when there is no key
    max.fill_(0), sum.fill_(0);
    for (int64_t b = 0; b < call.batch; b++) {
      if (!call.sq[b] || !call.sk[b]) continue;
      Block x = block(call, q, k, v, pse, mask, scale, added.pse_type, b);
      auto [top, total, product] = softmax_tiles(x, dropout(call, drop, keep, b), added.sink, q.scalar_type());
      Tensor y = product / total;
      if (x.dead.defined()) {
        y = y.masked_fill(x.dead, 0);
        top = top.masked_fill(x.dead, -FLT_MAX);
        total = total.masked_fill(x.dead, FLT_MAX);
      }
      write(entry(call, out, b, call.heads, call.sq), y);
      statistics(call, max, softmax_layout, b).copy_(top.expand({-1, -1, 8}));
      statistics(call, sum, softmax_layout, b).copy_(total.expand({-1, -1, 8}));
    }
  };
}

Work backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, const Tensor& pse,
              const Tensor& drop, const Tensor& padding, const Tensor& mask, const Tensor& max, const Tensor& sum,
              const Tensor& out, const Ints& prefix, const Ints& lengths_q, const Ints& lengths_k, double scale,
              double keep, int64_t pre, int64_t next, int64_t heads, const std::string& layout, int64_t precise,
              int64_t mode, const std::string& softmax_layout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
              const Tensor& dpse, const Added& added, const Tensor& dsink) {
  Call call = check(q, k, v, pse, drop, padding, mask, prefix, lengths_q, lengths_k, keep, pre, next, heads, layout,
                    precise, mode, added);
  require(dy.sizes() == out.sizes(), kTiling, "dy and attention_in differ in shape");
  if (q.numel()) {
    check_statistics(call, q, max, "softmax_max");
    check_statistics(call, q, sum, "softmax_sum");
  }
  return [=] {
    auto round = [&](const Tensor& x) { return x.to(q.scalar_type()).to(at::kFloat); };
    for (const Tensor& gradient : {dq, dk, dv}) gradient.zero_();
    Tensor bias = pse.defined() && dpse.defined() ? at::zeros(pse.sizes(), at::kFloat) : Tensor{};
    Tensor of_sink = added.sink.defined() ? at::zeros({heads}, at::kFloat) : Tensor{};
    for (int64_t b = 0; b < call.batch; b++) {
      if (!call.sq[b] || !call.sk[b]) continue;
      Block x = block(call, q, k, v, pse, mask, scale, added.pse_type, b);
      Tensor top = statistics(call, max, softmax_layout, b).narrow(-1, 0, 1);
      Tensor total = statistics(call, sum, softmax_layout, b).narrow(-1, 0, 1);
      Tensor p = (x.score - top).exp_() / total;
      if (x.dead.defined()) p.masked_fill_(x.dead, 0);
      Tensor g = entry(call, dy, b, call.heads, call.sq).to(at::kFloat);
      Tensor y = entry(call, out, b, call.heads, call.sq).to(at::kFloat);
      Tensor keep_bits = dropout(call, drop, keep, b);
      Tensor dp = at::matmul(g, x.v.transpose(-1, -2));
      if (keep_bits.defined()) dp = dp * keep_bits;
      Tensor row_sums = (g * y).sum(-1, true);
      Tensor ds = round(p * (dp - row_sums));
      if (of_sink.defined()) {
        Tensor share = (added.sink.view({-1, 1, 1}) - top).exp_() / total;
        if (x.dead.defined()) share.masked_fill_(x.dead, 0);
        of_sink.sub_((share * row_sums).sum({1, 2}));
      }
      Tensor pv = round(keep_bits.defined() ? p * keep_bits : p);
      // The library has no gradient of slopes.
      if (bias.defined() && (added.pse_type == kAddMul || added.pse_type == kMulAdd)) {
        Tensor part = bias[bias.size(0) == 1 ? 0 : b];
        part.add_(at::sum_to(added.pse_type == kAddMul ? ds * scale : ds, part.sizes()));
      }
      auto by_group = [&](const Tensor& gradient) { return gradient.unflatten(0, {call.kv_heads, -1}).sum(1); };
      write(entry(call, dq, b, call.heads, call.sq), kernels::product(ds, x.k) * scale);
      write(entry(call, dk, b, call.kv_heads, call.sk), by_group(kernels::product(ds.transpose(-1, -2), x.q) * scale));
      write(entry(call, dv, b, call.kv_heads, call.sk), by_group(kernels::product(pv.transpose(-1, -2), g)));
    }
    write(dpse, bias);
    write(dsink, of_sink);
  };
}

}  // namespace halsim::attention
