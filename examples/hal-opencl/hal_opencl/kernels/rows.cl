// Converts tensors of any layout to the rows of floats [heads][tokens][d] that attention.cl uses, and back.
//
// Token t of a dense batch is token t % length of sequence t / length. b, s, h: the tensor's strides over sequence,
// token and head; channels are adjacent. A group copies CHUNK / d rows or at least one.
#define EACH_ROW(tokens)                                                                       \
    const long head = get_group_id(1), each = max((long)1, (long)CHUNK / d);                   \
    for (long t = get_group_id(0) * each; t < min((long)(get_group_id(0) + 1) * each, tokens); t++)

kernel void to_rows(IN(T, x), OUT(f32, rows), const long tokens, const long length, const long d, const long b,
                    const long s, const long h) {
    global const T *x = TENSOR(x);
    global f32 *rows = TENSOR(rows);
    EACH_ROW(tokens) {
        global const T *from = x + t / length * b + t % length * s + head * h;
        FOR_COLUMNS(c, n, 0, d) STORE_N(f32, rows + (head * tokens + t) * d + c, LOAD_N(T, from + c, n), n);
    }
}

kernel void from_rows(IN(f32, rows), OUT(T, x), const long tokens, const long length, const long d, const long b,
                      const long s, const long h) {
    global const f32 *rows = TENSOR(rows);
    global T *x = TENSOR(x);
    EACH_ROW(tokens) {
        global T *to = x + t / length * b + t % length * s + head * h;
        FOR_COLUMNS(c, n, 0, d) STORE_N(T, to + c, LOAD_N(f32, rows + (head * tokens + t) * d + c, n), n);
    }
}
