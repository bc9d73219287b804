/* Small operators between products: a few thousand elements, for which a call of torch takes longer than the work.
 *
 * Each function has the form of dnnl_primitive_execute, so that one list has both: (numbers, not used, count of tensors, addresses).
 * Arithmetic is in fp32, and each result is rounded to the dtype of its tensor, as torch does for bf16; in a bool all but 0 is true.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "openmp.h"

/* FOR_EACH_CPU(type, name, (parameters), (arguments)) defines a function by its body, `any_name`. The body is compiled for each of
 * these instruction sets, and a call takes the best one that the CPU has and the library may use. NC_NO_CLONES: tests leave them out. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NC_NO_CLONES)
#define CLONES (1 << ISA_AVX512 | 1 << ISA_AVX2)
#define FOR_EACH_CPU(type, name, parameters, arguments)                                     \
    static __attribute__((target("avx512f"))) type name##_avx512 parameters                 \
    {                                                                                       \
        return any_##name arguments;                                                        \
    }                                                                                       \
    static __attribute__((target("avx2"))) type name##_avx2 parameters                      \
    {                                                                                       \
        return any_##name arguments;                                                        \
    }                                                                                       \
    static type name##_sse2 parameters                                                      \
    {                                                                                       \
        return any_##name arguments;                                                        \
    }                                                                                       \
    static type name parameters                                                             \
    {                                                                                       \
        const int64_t isa = nc_step_isa();                                                  \
        if (isa == ISA_AVX512)                                                              \
            return name##_avx512 arguments;                                                 \
        return isa == ISA_AVX2 ? name##_avx2 arguments : name##_sse2 arguments;             \
    }

/* The instruction set whose code is called; -1: that which every CPU has. */
int64_t nc_step_isa(void)
{
    if (nc_permitted >> ISA_AVX512 & 1 && __builtin_cpu_supports("avx512f"))
        return ISA_AVX512;
    return nc_permitted >> ISA_AVX2 & 1 && __builtin_cpu_supports("avx2") ? ISA_AVX2 : -1;
}
#else
#define CLONES 0
#define FOR_EACH_CPU(type, name, parameters, arguments) \
    static type name parameters { return any_##name arguments; }

int64_t nc_step_isa(void) { return -1; }
#endif

/* Part of the functions above: between them, a call for each key would take as long as its work. */
#define INLINE static inline __attribute__((always_inline))

enum { F32, BF16, BOOL, I64, U8, S8 };
enum { COPY, ADD, SUB, MUL, DIV, NEG, ABS, SQRT, RSQRT, RECIPROCAL, SQUARE, RELU, EXP, SIGMOID, SILU, TANH, GELU_TANH, GELU_ERF, COS, SIN, NOT, SELECT };
enum { OPERATORS = SELECT + 1 };
enum { ROW = 512, MOST_DIMS = 8 };

/* What `load` reads, what `store` writes, and what `store_codes` does. */
INLINE int is_read(int64_t dtype) { return dtype >= F32 && dtype <= I64; }
INLINE int is_written(int64_t dtype) { return dtype >= F32 && dtype <= BOOL; }
INLINE int is_code(int64_t dtype) { return dtype == U8 || dtype == S8; }

INLINE int64_t bytes_of(int64_t dtype) { return dtype == F32 ? 4 : dtype == BF16 ? 2 : dtype == I64 ? 8 : 1; }

INLINE float from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

INLINE uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
}

/* n elements that are `stride` apart, as fp32; where they are that already, nothing is copied. */
INLINE const float *load(const char *from, int64_t dtype, int64_t stride, int64_t n, float *buffer)
{
    if (dtype == F32 && stride == 1)
        return (const float *)from;
    if (dtype == F32)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = ((const float *)from)[i * stride];
    else if (dtype == BOOL)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = ((const uint8_t *)from)[i * stride];
    else if (dtype == I64)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = (float)((const int64_t *)from)[i * stride];
    else
        for (int64_t i = 0; i < n; i++)
            buffer[i] = from_bf16(((const uint16_t *)from)[i * stride]);
    return buffer;
}

INLINE void store(char *to, int64_t dtype, int64_t stride, int64_t n, const float *values)
{
    if (dtype == F32)
        for (int64_t i = 0; i < n; i++)
            ((float *)to)[i * stride] = values[i];
    else if (dtype == BOOL)
        for (int64_t i = 0; i < n; i++)
            ((uint8_t *)to)[i * stride] = values[i] != 0;
    else
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)to)[i * stride] = to_bf16(values[i]);
}

/* How numbers become codes. */
struct codes {
    int64_t dtype; /* U8 or S8 */
    float inverse, zero_point;
};

/* From two numbers of a list: the bits of 1 / scale (a float), and the zero point. */
INLINE struct codes codes_of(int64_t dtype, const int64_t *how)
{
    const uint32_t bits = (uint32_t)how[0];
    struct codes codes = {.dtype = dtype, .zero_point = (float)how[1]};
    memcpy(&codes.inverse, &bits, 4);
    return codes;
}

INLINE void store_codes(char *to, struct codes codes, int64_t n, const float *restrict values)
{
    const float low = (codes.dtype == U8 ? 0 : -128) - codes.zero_point, high = low + 255;
    uint8_t *restrict y = (uint8_t *)to;
    for (int64_t i = 0; i < n; i++) {
        float value = rintf(values[i] * codes.inverse);
        value = value > low ? value : low; /* also where it is not a number */
        value = value < high ? value : high;
        y[i] = (uint8_t)(int)(value + codes.zero_point); /* an int8 code has the same bits */
    }
}

/* e^x within 2 units in the last place: x = n ln 2 + r, and a polynomial for e^r (the coefficients of Cephes, S. Moshier). */
INLINE float exponential(float x)
{
    float limited = x > -87.0f ? x < 88.0f ? x : 88.0f : -87.0f; /* also where x is no number, which has no integer */
    float n = rintf(limited * 1.44269504088896341f);
    float r = limited - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    uint32_t bits;
    float power;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    bits = (uint32_t)((int32_t)n + 127) << 23;
    memcpy(&power, &bits, 4);
    p = (p * r * r + r + 1.0f) * power;
    return x > 88.0f ? (x > 88.722839f ? INFINITY : expf(x)) : x < -87.0f ? (x < -104.0f ? 0.0f : expf(x)) : x != x ? x : p;
}

#define EACH(value)                       \
    for (int64_t i = 0; i < n; i++)       \
        y[i] = (value);                   \
    break

INLINE void any_apply(int64_t op, const float *restrict a, const float *restrict b, const float *restrict c, float *restrict y,
                      int64_t n)
{
    switch (op) {
    case COPY: EACH(a[i]);
    case ADD: EACH(a[i] + b[i]);
    case SUB: EACH(a[i] - b[i]);
    case MUL: EACH(a[i] * b[i]);
    case DIV: EACH(a[i] / b[i]);
    case NEG: EACH(-a[i]);
    case ABS: EACH(fabsf(a[i]));
    case SQRT: EACH(sqrtf(a[i]));
    case RSQRT: EACH(1.0f / sqrtf(a[i]));
    case RECIPROCAL: EACH(1.0f / a[i]);
    case SQUARE: EACH(a[i] * a[i]);
    case RELU: EACH(a[i] > 0 ? a[i] : a[i] != a[i] ? a[i] : 0.0f);
    case EXP: EACH(exponential(a[i]));
    case SIGMOID: EACH(1.0f / (1.0f + exponential(-a[i])));
    case SILU: EACH(a[i] / (1.0f + exponential(-a[i])));
    case TANH: EACH(tanhf(a[i]));
    case GELU_TANH: EACH(a[i] / (1.0f + exponential(-1.5957691216057308f * (a[i] + 0.044715f * a[i] * a[i] * a[i]))));
    case GELU_ERF: EACH(0.5f * a[i] * (1.0f + erff(0.70710678118654752f * a[i])));
    case COS: EACH(cosf(a[i]));
    case SIN: EACH(sinf(a[i]));
    case NOT: EACH(a[i] == 0);
    case SELECT: EACH(a[i] != 0 ? b[i] : c[i]);
    }
}
FOR_EACH_CPU(void, apply,
             (int64_t op, const float *restrict a, const float *restrict b, const float *restrict c, float *restrict y, int64_t n),
             (op, a, b, c, y, n))

/* y = op(a, b, c), elementwise.
 *
 * how: op, dimensions d, sizes [d]; for y, a, b, c: dtype, strides [d] in elements, of which 0 repeats
 * tensors: y, a and, where the operator reads them, b and c
 */
int nc_step_map(const int64_t *how, void *unused, int count, char *const *tensors)
{
    EXPECT(how[0] >= 2 && how[2] >= 1 && how[2] <= MOST_DIMS, OTHER_SIZE);
    TAKES(2 + how[1] + count * (how[1] + 1), 2, 4);
    const int64_t op = how[0], d = how[1], *sizes = how + 2, n = sizes[d - 1];
    int64_t rows = 1, index[MOST_DIMS] = {0};
    float buffers[4][ROW];
    (void)unused;
    EXPECT(op >= 0 && op < OPERATORS, OTHER_OPERATION);
    for (int64_t i = 0; i < d; i++)
        EXPECT(sizes[i] >= 0, OTHER_SIZE);
    EXPECT(count >= 2 + (op >= ADD && op <= DIV) + 2 * (op == SELECT), OTHER_TENSORS);
    for (int t = 0; t < count; t++) {
        const int64_t dtype = sizes[d + t * (d + 1)];
        EXPECT(t ? is_read(dtype) : is_written(dtype), OTHER_DTYPE);
    }
    for (int64_t i = 0; i < d - 1; i++)
        rows *= sizes[i];
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t start = 0; start < n; start += ROW) {
            const int64_t part = n - start < ROW ? n - start : ROW;
            const float *values[4] = {buffers[0], buffers[0], buffers[0], buffers[0]};
            char *to = tensors[0];
            for (int t = 0; t < count; t++) {
                const int64_t *of = sizes + d + t * (d + 1), dtype = of[0], *strides = of + 1;
                int64_t at = start * strides[d - 1];
                for (int64_t i = 0; i < d - 1; i++)
                    at += index[i] * strides[i];
                if (t)
                    values[t] = load(tensors[t] + at * bytes_of(dtype), dtype, strides[d - 1], part, buffers[t]);
                else
                    to += at * bytes_of(dtype);
            }
            const int64_t dtype = sizes[d], stride = sizes[d + d];
            if (dtype == F32 && stride == 1) {
                apply(op, values[1], values[2], values[3], (float *)to, part);
            } else {
                apply(op, values[1], values[2], values[3], buffers[0], part);
                store(to, dtype, stride, part, buffers[0]);
            }
        }
        for (int64_t i = d - 2; i >= 0 && ++index[i] == sizes[i]; i--)
            index[i] = 0;
    }
    return 0;
}

/* The sum of 32 numbers, which are overwritten. */
INLINE float total(float *sums)
{
    for (int64_t width = 16; width; width /= 2)
        for (int64_t j = 0; j < width; j++)
            sums[j] += sums[j + width];
    return sums[0];
}

INLINE float any_sum_of(const float *x, int64_t n)
{
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int64_t j = 0; j < 32; j++)
            sums[j] += x[i + j];
    for (; i < n; i++)
        sum += x[i];
    return sum + total(sums);
}
FOR_EACH_CPU(float, sum_of, (const float *x, int64_t n), (x, n))

/* Means of rows. how: dtypes of y and x, rows, elements of a row, stride of rows; tensors: y, without gaps; x */
int nc_step_mean(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(5, 2, 2);
    const int64_t n = how[3];
    float buffer[ROW];
    (void)unused;
    EXPECT(is_written(how[0]) && is_read(how[1]), OTHER_DTYPE);
    EXPECT(how[2] >= 0 && n >= 0, OTHER_SIZE);
    for (int64_t row = 0; row < how[2]; row++) {
        float sum = 0;
        for (int64_t start = 0; start < n; start += ROW) {
            const int64_t part = n - start < ROW ? n - start : ROW;
            sum += sum_of(load(tensors[1] + (row * how[4] + start) * bytes_of(how[1]), how[1], 1, part, buffer), part);
        }
        sum /= (float)n;
        store(tensors[0] + row * bytes_of(how[0]), how[0], 1, 1, &sum);
    }
    return 0;
}

INLINE float any_squares_of(const float *x, float mean, int64_t n)
{
    float sums[32] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int64_t j = 0; j < 32; j++)
            sums[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (; i < n; i++)
        sum += (x[i] - mean) * (x[i] - mean);
    return sum + total(sums);
}
FOR_EACH_CPU(float, squares_of, (const float *x, float mean, int64_t n), (x, mean, n))

struct norm {
    const int64_t *how;
    char *const *tensors;
    float epsilon;
    struct codes codes;
};

INLINE void any_norm_row(const struct norm *job, int64_t row)
{
    const int64_t n = job->how[3], to = job->how[0], from = job->how[1];
    const float *weight = (const float *)job->tensors[2], *bias = (const float *)job->tensors[3];
    char *y = job->tensors[0] + row * n * bytes_of(to), *x = job->tensors[1] + row * n * bytes_of(from);
    float buffer[ROW], mean = 0, squares = 0;
    for (int64_t start = 0; job->how[5] && start < n; start += ROW) {
        const int64_t part = n - start < ROW ? n - start : ROW;
        mean += sum_of(load(x + start * bytes_of(from), from, 1, part, buffer), part);
    }
    mean /= (float)n;
    for (int64_t start = 0; start < n; start += ROW) {
        const int64_t part = n - start < ROW ? n - start : ROW;
        squares += squares_of(load(x + start * bytes_of(from), from, 1, part, buffer), mean, part);
    }
    const float factor = 1.0f / sqrtf(squares / (float)n + job->epsilon);
    for (int64_t start = 0; start < n; start += ROW) {
        const int64_t part = n - start < ROW ? n - start : ROW;
        const float *values = load(x + start * bytes_of(from), from, 1, part, buffer);
        for (int64_t i = 0; i < part; i++)
            buffer[i] = (values[i] - mean) * factor;
        for (int64_t i = 0; weight && i < part; i++)
            buffer[i] *= weight[start + i];
        for (int64_t i = 0; bias && i < part; i++)
            buffer[i] += bias[start + i];
        if (to == U8 || to == S8)
            store_codes(y + start, job->codes, part, buffer);
        else
            store(y + start * bytes_of(to), to, 1, part, buffer);
    }
}
FOR_EACH_CPU(void, norm_row, (const struct norm *job, int64_t row), (job, row))

static void norm_rows(void *data, int64_t part, int64_t parts)
{
    const struct norm *job = data;
    const int64_t rows = job->how[2];
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        norm_row(job, row);
}

/* Layer norm of rows, or RMS norm, which takes no mean off.
 *
 * how: dtypes of y and x, rows, elements of a row, the bits of epsilon (a float), whether it is a layer norm, threads; see `codes_of`
 * tensors: y and x, without gaps; weight and bias in fp32, or no address
 */
int nc_step_norm(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(9, 4, 4);
    struct norm job = {.how = how, .tensors = tensors, .codes = codes_of(how[0], how + 7)};
    (void)unused;
    EXPECT((is_written(how[0]) || is_code(how[0])) && is_read(how[1]), OTHER_DTYPE);
    EXPECT(how[2] >= 0 && how[3] >= 0, OTHER_SIZE);
    memcpy(&job.epsilon, how + 4, 4);
    in_parts(norm_rows, &job, 1 + how[2] * how[3] / 32768, how[6]);
    return 0;
}

/* Copy rows to, or from, a place that an index in memory names.
 *
 * how: bytes of a row; rows; for y and x: bytes between rows; bytes between places; places; whether y is the one with places;
 *   indices, one for all rows (1) or one each (0)
 * tensors: y, x, int64 indices. Returns OTHER_INDEX where an index is none of the places.
 */
int nc_step_place(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(8, 3, 3);
    const int64_t *indices = (const int64_t *)tensors[2];
    (void)unused;
    EXPECT(how[0] >= 0 && how[1] >= 0, OTHER_SIZE);
    for (int64_t row = 0; row < how[1]; row++) {
        const int64_t place = indices[how[7] ? 0 : row];
        char *y = tensors[0] + row * how[2], *x = tensors[1] + row * how[3];
        if (place < 0 || place >= how[5])
            return OTHER_INDEX;
        memcpy(y + (how[6] ? place * how[4] : 0), x + (how[6] ? 0 : place * how[4]), how[0]);
    }
    return 0;
}

INLINE float dot(const float *restrict a, const float *restrict b, int64_t n)
{
    float sums[16] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int64_t j = 0; j < 16; j++)
            sums[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (int64_t j = 0; j < 8; j++)
        sums[j] += sums[j + 8];
    for (int64_t j = 0; j < 4; j++)
        sums[j] += sums[j + 4];
    return sum + ((sums[0] + sums[2]) + (sums[1] + sums[3]));
}

INLINE void add_scaled(float *restrict y, const float *restrict x, float by, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += by * x[i];
}

INLINE void scale(float *y, float by, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] *= by;
}

enum { B, H, GROUP, KEYS, WIDTH, VALUE_WIDTH, MASK, DTYPES, Q = DTYPES + 5, K = Q + 2, V = K + 3, Y = V + 3, M = Y + 2, A_FACTOR = M + 3, A_THREADS };
enum { NO_MASK, BOOL_MASK, FLOAT_MASK };

struct attention {
    const int64_t *how;
    char *const *tensors;
    float factor;
};

/* One query of one head: softmax(q K^T * factor + mask) V, for ROW keys at a time; the largest score so far is taken off all
 * (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3). */
INLINE void any_attend(const struct attention *job, int64_t task)
{
    const int64_t *h = job->how, batch = task / h[H], head = task % h[H], shared = head / h[GROUP];
    const int64_t q_type = h[DTYPES], k_type = h[DTYPES + 1], v_type = h[DTYPES + 2], y_type = h[DTYPES + 3], m_type = h[DTYPES + 4];
    const char *keys = job->tensors[2] + (batch * h[K] + shared * h[K + 1]) * bytes_of(k_type);
    const char *values = job->tensors[3] + (batch * h[V] + shared * h[V + 1]) * bytes_of(v_type);
    const char *mask = job->tensors[4];
    const int64_t at = batch * h[M] + head * h[M + 1];
    float query[ROW], row[ROW], sum[ROW] = {0}, largest = -INFINITY, total = 0;
    const float *q = load(job->tensors[1] + (batch * h[Q] + head * h[Q + 1]) * bytes_of(q_type), q_type, 1, h[WIDTH], query);
    for (int64_t start = 0; start < h[KEYS]; start += ROW) {
        const int64_t count = h[KEYS] - start < ROW ? h[KEYS] - start : ROW;
        float scores[ROW], most = largest;
        int unknown = 0; /* a score that is no number */
        for (int64_t i = 0; i < count; i++) {
            const int64_t j = start + i, m = at + j * h[M + 2];
            if (h[MASK] == BOOL_MASK && !((const uint8_t *)mask)[m]) {
                scores[i] = -INFINITY;
                continue;
            }
            scores[i] = job->factor * dot(q, load(keys + j * h[K + 2] * bytes_of(k_type), k_type, 1, h[WIDTH], row), h[WIDTH]);
            if (h[MASK] == FLOAT_MASK) {
                float added;
                scores[i] += *load(mask + m * bytes_of(m_type), m_type, 1, 1, &added);
            }
            most = scores[i] > most ? scores[i] : most;
            unknown |= scores[i] != scores[i];
        }
        if (most == -INFINITY && !unknown) /* nothing is seen so far */
            continue;
        most = most == -INFINITY ? 0 : most;
        if (most > largest) {
            const float less = exponential(largest - most);
            scale(sum, less, h[VALUE_WIDTH]);
            total *= less;
            largest = most;
        }
        for (int64_t i = 0; i < count; i++)
            scores[i] = exponential(scores[i] - largest);
        for (int64_t i = 0; i < count; i++) {
            const int64_t j = start + i;
            if (scores[i] == 0)
                continue;
            total += scores[i];
            add_scaled(sum, load(values + j * h[V + 2] * bytes_of(v_type), v_type, 1, h[VALUE_WIDTH], row), scores[i], h[VALUE_WIDTH]);
        }
    }
    if (total != 0) /* a query that sees no key gets zeros, as from torch */
        scale(sum, 1.0f / total, h[VALUE_WIDTH]);
    store(job->tensors[0] + (batch * h[Y] + head * h[Y + 1]) * bytes_of(y_type), y_type, 1, h[VALUE_WIDTH], sum);
}
FOR_EACH_CPU(void, attend, (const struct attention *job, int64_t task), (job, task))

static void attend_all(void *data, int64_t part, int64_t parts)
{
    const struct attention *job = data;
    const int64_t tasks = job->how[B] * job->how[H];
    for (int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; task++)
        attend(job, task);
}

/* Attention of one query per head.
 *
 * how: batch, heads, heads that share keys and values, keys, width of keys (at most ROW), of values (likewise), kind of mask, dtypes of
 *   q, k, v, y and the mask; strides in elements: q and y [batch, head], k and v [batch, head, key], mask [batch, head, key];
 *   then the bits of the factor (a float), and threads
 * tensors: y, q, k, v, mask (where there is one)
 */
int nc_step_attention(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(A_THREADS + 1, 4, 5);
    struct attention job = {how, tensors, 0};
    const int64_t tasks = how[B] * how[H];
    /* as much work as a few thousand products is done before other threads wake up */
    const int64_t worth = 1 + tasks * how[KEYS] * how[WIDTH] / 65536;
    (void)unused;
    EXPECT(how[MASK] >= NO_MASK && how[MASK] <= FLOAT_MASK, OTHER_OPERATION);
    EXPECT(how[MASK] == NO_MASK || count == 5, OTHER_TENSORS);
    EXPECT(how[B] >= 0 && how[H] >= 0 && how[KEYS] >= 0 && how[GROUP] > 0, OTHER_SIZE);
    EXPECT(how[WIDTH] >= 0 && how[WIDTH] <= ROW && how[VALUE_WIDTH] >= 0 && how[VALUE_WIDTH] <= ROW, OTHER_SIZE);
    for (int i = 0; i < 5; i++)
        EXPECT(i == 3 ? is_written(how[DTYPES + i]) : is_read(how[DTYPES + i]), OTHER_DTYPE);
    memcpy(&job.factor, how + A_FACTOR, 4);
    in_parts(attend_all, &job, worth < tasks ? worth : tasks, how[A_THREADS]);
    return 0;
}

enum { TO, HALF, SIZES, R_THREADS = SIZES + 3, R_CODES, R_Y = R_CODES + 2, R_X = R_Y + 3, R_COS = R_X + 3, R_SIN = R_COS + 3 };

struct rotation {
    const int64_t *how;
    char *const *tensors;
    struct codes codes;
};

INLINE void any_rotate_row(const struct rotation *job, int64_t row)
{
    const int64_t *how = job->how, half = how[HALF];
    const int64_t k = row % how[SIZES + 2], j = row / how[SIZES + 2] % how[SIZES + 1], i = row / how[SIZES + 2] / how[SIZES + 1];
    const float *x = (const float *)job->tensors[1] + i * how[R_X] + j * how[R_X + 1] + k * how[R_X + 2];
    const float *cosine = (const float *)job->tensors[2] + i * how[R_COS] + j * how[R_COS + 1] + k * how[R_COS + 2];
    const float *sine = (const float *)job->tensors[3] + i * how[R_SIN] + j * how[R_SIN + 1] + k * how[R_SIN + 2];
    char *y = job->tensors[0] + (i * how[R_Y] + j * how[R_Y + 1] + k * how[R_Y + 2]) * bytes_of(how[TO]);
    float turned[ROW];
    for (int64_t n = 0; n < half; n++)
        turned[n] = x[n] * cosine[n] - x[half + n] * sine[n];
    for (int64_t n = 0; n < half; n++)
        turned[half + n] = x[half + n] * cosine[half + n] + x[n] * sine[half + n];
    if (how[TO] == F32)
        memcpy(y, turned, (size_t)(2 * half) * 4);
    else
        store_codes(y, job->codes, 2 * half, turned);
}
FOR_EACH_CPU(void, rotate_row, (const struct rotation *job, int64_t row), (job, row))

static void rotate_rows(void *data, int64_t part, int64_t parts)
{
    const struct rotation *job = data;
    const int64_t rows = job->how[SIZES] * job->how[SIZES + 1] * job->how[SIZES + 2];
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        rotate_row(job, row);
}

/* Rotary embedding: y = x cos + (-second half of x, first half of x) sin, along rows without gaps.
 *
 * how: dtype of y (F32, U8 or S8); half of a row (ROW / 2 at most); sizes [3] of the rows; threads; see `codes_of`; strides [3] in
 *   elements of y, x, cos and sin, of which 0 repeats
 * tensors: y; x, cos and sin in fp32
 */
int nc_step_rotary(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(R_SIN + 3, 4, 4);
    struct rotation job = {how, tensors, codes_of(how[TO], how + R_CODES)};
    (void)unused;
    EXPECT(how[TO] == F32 || is_code(how[TO]), OTHER_DTYPE);
    EXPECT(how[HALF] >= 0 && 2 * how[HALF] <= ROW, OTHER_SIZE);
    EXPECT(how[SIZES] >= 0 && how[SIZES + 1] >= 0 && how[SIZES + 2] >= 0, OTHER_SIZE);
    in_parts(rotate_rows, &job, 1 + how[SIZES] * how[SIZES + 1] * how[SIZES + 2] * how[HALF] / 8192, how[R_THREADS]);
    return 0;
}

enum { PIXELS = 256 }; /* of an image that are quantized at once */

struct image {
    const int64_t *how;
    const float *x;
    char *y;
    struct codes codes;
};

INLINE void any_quantize_pixels(const struct image *job, int64_t unit)
{
    const int64_t pixels = job->how[1], units = (pixels + PIXELS - 1) / PIXELS, start = unit % units * PIXELS;
    const int64_t n = pixels - start < PIXELS ? pixels - start : PIXELS, image = unit / units;
    char *restrict y = job->y + (image * pixels + start) * 3;
    char codes[3][PIXELS];
    for (int c = 0; c < 3; c++)
        store_codes(codes[c], job->codes, n, job->x + (image * 3 + c) * pixels + start);
    for (int64_t i = 0; i < n; i++) {
        y[3 * i] = codes[0][i];
        y[3 * i + 1] = codes[1][i];
        y[3 * i + 2] = codes[2][i];
    }
}
FOR_EACH_CPU(void, quantize_pixels, (const struct image *job, int64_t unit), (job, unit))

static void quantize_images(void *data, int64_t part, int64_t parts)
{
    const struct image *job = data;
    const int64_t units = job->how[0] * ((job->how[1] + PIXELS - 1) / PIXELS);
    for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++)
        quantize_pixels(job, unit);
}

/* Codes of images with three channels, fp32 [images, 3, pixels] as uint8 [images, pixels, 3].
 *
 * how: images, pixels, see `codes_of`, threads; tensors: y, x
 */
int nc_step_image(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(5, 2, 2);
    struct image job = {.how = how, .x = (const float *)tensors[1], .y = tensors[0], .codes = codes_of(U8, how + 2)};
    (void)unused;
    EXPECT(how[0] >= 0 && how[1] >= 0, OTHER_SIZE);
    in_parts(quantize_images, &job, 1 + how[0] * how[1] / 8192, how[4]);
    return 0;
}

/* Memory of a list whose address is known at each call only: see runner.c. */
int nc_step_set(void *place, void *address)
{
    *(void **)place = address;
    return 0;
}

/* Each function has code for any CPU besides. */
int64_t nc_isas(void) { return CLONES; }
