// Included before every kernel file: vectors of LANES floats, element types, reductions over a row, random numbers.
//
// The same source is used for both kinds of device. If the device prefers vectors (a CPU), a work-item processes LANES
// columns at a time and a row belongs to one work-item (GROUP = 1). Otherwise (a GPU), LANES is 1 or 4 and GROUP
// work-items share a row. Both are -D options; the order of sums depends only on them and on shapes, so runs are
// bit-equal.
//
// Arithmetic is in float. Element types are f32, bf16 and f16; the last two are stored as ushort, so that neither
// cl_khr_fp16 nor a bfloat16 type is needed: bf16 is a shift, f16 goes through vload_half and vstore_half.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#if LANES == 1
#define VECTOR(type) type
#define VLOAD(p) (*(p))
#define VSTORE(v, p) (*(p) = (v))
#define VLOAD_HALF(p) vload_half(0, p)
#define VSTORE_HALF(v, p) vstore_half_rte(v, 0, p)
#define CONVERT(type) convert_##type
#define AS(type) as_##type
#define ANY(condition) (condition)
#else
#define VECTOR(type) CAT(type, LANES)
#define VLOAD(p) CAT(vload, LANES)(0, p)
#define VSTORE(v, p) CAT(vstore, LANES)(v, 0, p)
#define VLOAD_HALF(p) CAT(vload_half, LANES)(0, p)
#define VSTORE_HALF(v, p) CAT(CAT(vstore_half, LANES), _rte)(v, 0, p)
#define CONVERT(type) CAT(CAT(convert_, type), LANES)
#define AS(type) CAT(CAT(as_, type), LANES)
#define ANY(condition) any(condition)
#endif
typedef VECTOR(float) vec;
typedef VECTOR(int) ivec;
typedef VECTOR(uint) uvec;
typedef VECTOR(ulong) ulvec;

typedef float f32;
typedef ushort bf16;
typedef ushort f16;

// A tensor argument is a buffer and the index of the tensor's first element in it; a buffer of NULL is "no tensor".
#define IN(type, x) global const type *x##_buffer, const long x##_at
#define OUT(type, x) global type *x##_buffer, const long x##_at
#define TENSOR(x) (x##_buffer ? x##_buffer + x##_at : 0)

// LOAD(type, p): LANES elements as floats. LOAD_FILL reads only the first n, the rest is `fill`; LOAD_N fills with 0.
// STORE and STORE_N write likewise.
#define LOAD(type, p) CAT(load_, type)(p)
#define LOAD_FILL(type, p, n, fill) ((n) >= LANES ? LOAD(type, p) : CAT(load_fill_, type)(p, n, fill))
#define LOAD_N(type, p, n) LOAD_FILL(type, p, n, 0)
#define STORE(type, p, v) CAT(store_, type)(p, v)
#define STORE_N(type, p, v, n) \
    do { if ((n) >= LANES) STORE(type, p, v); else CAT(store_n_, type)(p, v, n); } while (0)
#define GET(type, p) CAT(get_, type)(p)
#define PUT(type, p, v) CAT(put_, type)(p, v)

static inline float get_f32(global const f32 *p) { return *p; }
static inline float get_bf16(global const bf16 *p) { return as_float((uint)*p << 16); }
static inline float get_f16(global const f16 *p) { return vload_half(0, (global const half *)p); }
static inline void put_f32(global f32 *p, float v) { *p = v; }
static inline void put_bf16(global bf16 *p, float v) {
    const uint u = as_uint(v);
    *p = isnan(v) ? (ushort)0x7fc0 : (ushort)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline void put_f16(global f16 *p, float v) { vstore_half_rte(v, 0, (global half *)p); }

static inline vec load_f32(global const f32 *p) { return VLOAD(p); }
static inline vec load_bf16(global const bf16 *p) { return AS(float)(CONVERT(uint)(VLOAD(p)) << 16); }
// pocl 3.1 takes the pointers of vload_half8 and vstore_half8 as aligned to 16 bytes, although OpenCL requires 2.
static inline vec load_f16(global const f16 *p) {
    const VECTOR(ushort) bits = VLOAD(p);
    return VLOAD_HALF((const half *)&bits);
}
static inline void store_f32(global f32 *p, vec v) { VSTORE(v, p); }
static inline void store_bf16(global bf16 *p, vec v) {
    const uvec u = AS(uint)(v), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    VSTORE(CONVERT(ushort)(isnan(v) ? (uvec)0x7fc0 : rounded), p);
}
static inline void store_f16(global f16 *p, vec v) {
    VECTOR(ushort) bits;
    VSTORE_HALF(v, (half *)&bits);
    VSTORE(bits, p);
}

#define TAILS(type)                                                                   \
    static inline vec load_fill_##type(global const type *p, long n, float fill) {    \
        float v[LANES];                                                               \
        for (long i = 0; i < LANES; i++) v[i] = i < n ? get_##type(p + i) : fill;     \
        return VLOAD(v);                                                              \
    }                                                                                 \
    static inline void store_n_##type(global type *p, vec v, long n) {                \
        float all[LANES];                                                             \
        VSTORE(v, all);                                                               \
        for (long i = 0; i < n; i++) put_##type(p + i, all[i]);                       \
    }
TAILS(f32)
TAILS(bf16)
TAILS(f16)

// The sum (or the maximum) of the lanes of a vector, in a fixed order.
#define FOLD(name, op)                                                                \
    static inline float name(vec v) {                                                        \
        float x[LANES];                                                               \
        VSTORE(v, x);                                                                 \
        for (int half_ = LANES / 2; half_ > 0; half_ /= 2)                            \
            for (int i = 0; i < half_; i++) x[i] = op(x[i], x[i + half_]);            \
        return x[0];                                                                  \
    }
#define PLUS(a, b) ((a) + (b))
FOLD(lanes_sum, PLUS)
FOLD(lanes_max, fmax)

// Iterates over the columns [begin, end) of a row that a work-item of a group processes, LANES columns at a time,
// starting at c; n is the number of columns left, which is less than LANES in the last iteration of a short row.
#define FOR_COLUMNS(c, n, begin, end)                                                 \
    for (long c = (begin) + (long)get_local_id(0) * LANES, n; n = (end) - c, n > 0; c += GROUP * LANES)

// Used by kernels that sum over rows: a group processes SPAN columns of a piece of the rows and writes the sums of the
// piece to its row of `partial`, which column_sum (reduce.cl) adds up in order. ADD_N starts a sum at the first row.
#define FOR_PIECE(row, rows)                                                          \
    for (long row = (rows) * get_group_id(1) / get_num_groups(1), row0 = row;         \
         row < (rows) * (get_group_id(1) + 1) / get_num_groups(1); row++)
#define FOR_SPAN(c, n, width)                                                         \
    FOR_COLUMNS(c, n, get_group_id(0) * SPAN, min((long)(get_group_id(0) + 1) * SPAN, width))
#define ADD_N(p, v, n) STORE_N(f32, p, row == row0 ? (v) : LOAD_N(f32, p, n) + (v), n)

// Reductions over the work-items of a group; all of them get the result. `scratch` is LOCAL_SCRATCH.
#if GROUP == 1
#define LOCAL_SCRATCH
#define group_sum(v) (v)
#define group_max(v) (v)
#else
#define LOCAL_SCRATCH local float scratch[GROUP];
#define group_sum(v) group_fold(v, scratch, 0)
#define group_max(v) group_fold(v, scratch, 1)
static inline float group_fold(float v, local float *scratch, int maximum) {
    const int me = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[me] = v;
    for (int step = GROUP / 2; step > 0; step /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (me < step) scratch[me] = maximum ? fmax(scratch[me], scratch[me + step]) : scratch[me] + scratch[me + step];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[0];
}
#endif

// Philox4x32-10 (Salmon et al., SC 2011) for LANES elements e: word e % 4 of the block with counter offset + e / 4.
static inline uvec philox(const ulong seed, const ulong offset, const ulvec element) {
    const ulvec counter = offset + (element >> 2);
    ulvec c0 = counter & 0xffffffff, c1 = counter >> 32, c2 = 0, c3 = 0;
    uint k0 = (uint)seed, k1 = (uint)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const ulvec p0 = c0 * 0xD2511F53UL, p1 = c2 * 0xCD9E8D57UL;
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1 & 0xffffffff;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0 & 0xffffffff;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    const ulvec low = (element & 1) != 0 ? c1 : c0, high = (element & 1) != 0 ? c3 : c2;
    return CONVERT(uint)((element & 2) != 0 ? high : low);
}

// 0, 1, ... LANES - 1.
static inline ulvec lane_numbers(void) {
    ulong i[LANES];
    for (int n = 0; n < LANES; n++) i[n] = n;
    return VLOAD(i);
}

// v * scale where dropout keeps an element, else 0. first: index of the first lane's element in the draw.
static inline vec drop(vec v, ulong seed, ulong offset, ulong first, uint threshold, float scale) {
    const uvec bits = philox(seed, offset, first + lane_numbers());
    return (bits >> 8) >= threshold ? v * scale : (vec)0;
}
