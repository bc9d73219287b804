/* Small operators between products: a few thousand elements, for which a call of torch takes longer than the
 * work.
 *
 * abi.py has what each function takes. Arithmetic is in fp32, and each result is rounded to the dtype of its
 * tensor, as torch does for bf16; in a bool all but 0 is true.
 */
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

/* FOR_EACH_CPU(type, name, (parameters), (arguments)) defines a function by its body, `any_name`. The body is
 * compiled for each of these instruction sets, and a call takes the best one that the CPU has and the library
 * may use. NC_NO_CLONES: tests leave them out. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NC_NO_CLONES)
#define CLONES (1 << ISA_AVX512 | 1 << ISA_AVX2)
#define FOR_EACH_CPU(type, name, parameters, arguments)                                     \
    static FOR_CPU("avx512f") type name##_avx512 parameters                 \
    {                                                                                       \
        return any_##name arguments;                                                        \
    }                                                                                       \
    static FOR_CPU("avx2") type name##_avx2 parameters                      \
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
    if (nc_permitted >> ISA_AVX512 & 1 && CPU_SUPPORTS("avx512f"))
        return ISA_AVX512;
    return nc_permitted >> ISA_AVX2 & 1 && CPU_SUPPORTS("avx2") ? ISA_AVX2 : -1;
}
#else
#define CLONES 0
#define FOR_EACH_CPU(type, name, parameters, arguments) \
    static type name parameters { return any_##name arguments; }

int64_t nc_step_isa(void) { return -1; }
#endif

/* Part of the functions above: between them, a call for each key would take as long as its work. */
#define INLINE static inline __attribute__((always_inline))

/* What `load` reads, what `store` writes, and what `store_codes` does. */
INLINE int is_written(int64_t dtype)
{
    return dtype == DTYPE_F32 || dtype == DTYPE_BF16 || dtype == DTYPE_BOOL;
}
INLINE int is_read(int64_t dtype) { return is_written(dtype) || dtype == DTYPE_I64; }
INLINE int is_code(int64_t dtype) { return dtype == DTYPE_U8 || dtype == DTYPE_S8; }

INLINE int64_t bytes_of(int64_t dtype)
{
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_BF16 ? 2 : dtype == DTYPE_I64 ? 8 : 1;
}

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
    if (dtype == DTYPE_F32 && stride == 1)
        return (const float *)from;
    if (dtype == DTYPE_F32)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = ((const float *)from)[i * stride];
    else if (dtype == DTYPE_BOOL)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = ((const uint8_t *)from)[i * stride];
    else if (dtype == DTYPE_I64)
        for (int64_t i = 0; i < n; i++)
            buffer[i] = (float)((const int64_t *)from)[i * stride];
    else
        for (int64_t i = 0; i < n; i++)
            buffer[i] = from_bf16(((const uint16_t *)from)[i * stride]);
    return buffer;
}

INLINE void store(char *to, int64_t dtype, int64_t stride, int64_t n, const float *values)
{
    if (dtype == DTYPE_F32)
        for (int64_t i = 0; i < n; i++)
            ((float *)to)[i * stride] = values[i];
    else if (dtype == DTYPE_BOOL)
        for (int64_t i = 0; i < n; i++)
            ((uint8_t *)to)[i * stride] = values[i] != 0;
    else
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)to)[i * stride] = to_bf16(values[i]);
}

/* How numbers become codes. */
struct codes {
    int64_t dtype; /* DTYPE_U8 or DTYPE_S8 */
    float inverse, zero_point;
};

INLINE struct codes codes_of(int64_t dtype, double inverse, int64_t zero_point)
{
    return (struct codes){dtype, (float)inverse, (float)zero_point};
}

/* A sum with it has the integer nearest to the other number, ties to even, in its lowest bits. */
#define TO_NEAREST 12582912.0f

INLINE void store_codes(char *to, struct codes codes, int64_t n, const float *restrict values)
{
    const float low = (codes.dtype == DTYPE_U8 ? 0 : -128) - codes.zero_point, high = low + 255;
    const uint32_t zero_point = (uint32_t)(int32_t)codes.zero_point;
    uint8_t *restrict y = (uint8_t *)to;
    for (int64_t i = 0; i < n; i++) {
        float value = values[i] * codes.inverse;
        uint32_t bits;
        value = value > low ? value : low; /* also where it is not a number */
        value = (value < high ? value : high) + TO_NEAREST;
        memcpy(&bits, &value, 4);
        y[i] = (uint8_t)(bits + zero_point); /* an int8 code has the same bits */
    }
}

/* e^x within 2 units in the last place: x = n ln 2 + r, and a polynomial for e^r (the coefficients of Cephes,
 * S. Moshier). */
INLINE float exponential(float x)
{
    /* also where x is no number, which has no integer */
    float limited = x > -87.0f ? x < 88.0f ? x : 88.0f : -87.0f;
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
    return x > 88.0f ? (x > 88.722839f ? INFINITY : expf(x))
        : x < -87.0f ? (x < -104.0f ? 0.0f : expf(x)) : x != x ? x : p;
}

#define EACH(value)                       \
    for (int64_t i = 0; i < n; i++)       \
        y[i] = (value);                   \
    break

INLINE void any_apply(int64_t op, const float *restrict a, const float *restrict b, const float *restrict c,
    float *restrict y, int64_t n)
{
    switch (op) {
    case MAP_COPY: EACH(a[i]);
    case MAP_ADD: EACH(a[i] + b[i]);
    case MAP_SUB: EACH(a[i] - b[i]);
    case MAP_MUL: EACH(a[i] * b[i]);
    case MAP_DIV: EACH(a[i] / b[i]);
    case MAP_NEG: EACH(-a[i]);
    case MAP_ABS: EACH(fabsf(a[i]));
    case MAP_SQRT: EACH(sqrtf(a[i]));
    case MAP_RSQRT: EACH(1.0f / sqrtf(a[i]));
    case MAP_RECIPROCAL: EACH(1.0f / a[i]);
    case MAP_SQUARE: EACH(a[i] * a[i]);
    case MAP_RELU: EACH(a[i] > 0 ? a[i] : a[i] != a[i] ? a[i] : 0.0f);
    case MAP_EXP: EACH(exponential(a[i]));
    case MAP_SIGMOID: EACH(1.0f / (1.0f + exponential(-a[i])));
    case MAP_SILU: EACH(a[i] / (1.0f + exponential(-a[i])));
    case MAP_TANH: EACH(tanhf(a[i]));
    case MAP_GELU_TANH:
        EACH(a[i] / (1.0f + exponential(-1.5957691216057308f * (a[i] + 0.044715f * a[i] * a[i] * a[i]))));
    case MAP_GELU_ERF: EACH(0.5f * a[i] * (1.0f + erff(0.70710678118654752f * a[i])));
    case MAP_COS: EACH(cosf(a[i]));
    case MAP_SIN: EACH(sinf(a[i]));
    case MAP_NOT: EACH(a[i] == 0);
    case MAP_SELECT: EACH(a[i] != 0 ? b[i] : c[i]);
    }
}
FOR_EACH_CPU(void, apply,
    (int64_t op, const float *restrict a, const float *restrict b, const float *restrict c, float *restrict y,
        int64_t n),
    (op, a, b, c, y, n))

/* tensors: y, a and, where the operator reads them, b and c */
int nc_map(const struct nc_map *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_map);
    EXPECT(how->dims >= 1 && how->dims <= MOST_DIMS, OTHER_SIZE);
    const int64_t op = how->operator, last = how->dims - 1, n = how->sizes[last];
    int64_t rows = 1, index[MOST_DIMS] = {0};
    float buffers[MOST_OPERANDS][ROW];
    EXPECT(op >= MAP_COPY && op <= MAP_SELECT, OTHER_OPERATION);
    for (int64_t i = 0; i < how->dims; i++)
        EXPECT(how->sizes[i] >= 0, OTHER_SIZE);
    EXPECT(count >= 2 + (op >= MAP_ADD && op <= MAP_DIV) + 2 * (op == MAP_SELECT), OTHER_TENSORS);
    for (int t = 0; t < count; t++)
        EXPECT(t ? is_read(how->dtypes[t]) : is_written(how->dtypes[t]), OTHER_DTYPE);
    for (int64_t i = 0; i < last; i++)
        rows *= how->sizes[i];
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t start = 0; start < n; start += ROW) {
            const int64_t part = n - start < ROW ? n - start : ROW;
            const float *values[MOST_OPERANDS] = {buffers[0], buffers[0], buffers[0], buffers[0]};
            char *to = tensors[0];
            for (int t = 0; t < count; t++) {
                const int64_t dtype = how->dtypes[t], *strides = how->strides[t];
                int64_t at = start * strides[last];
                for (int64_t i = 0; i < last; i++)
                    at += index[i] * strides[i];
                if (t)
                    values[t] =
                        load(tensors[t] + at * bytes_of(dtype), dtype, strides[last], part, buffers[t]);
                else
                    to += at * bytes_of(dtype);
            }
            const int64_t dtype = how->dtypes[0], stride = how->strides[0][last];
            if (dtype == DTYPE_F32 && stride == 1) {
                apply(op, values[1], values[2], values[3], (float *)to, part);
            } else {
                apply(op, values[1], values[2], values[3], buffers[0], part);
                store(to, dtype, stride, part, buffers[0]);
            }
        }
        for (int64_t i = last - 1; i >= 0 && ++index[i] == how->sizes[i]; i--)
            index[i] = 0;
    }
    return OK;
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

/* tensors: y, without gaps; x */
int nc_mean(const struct nc_mean *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_mean);
    const int64_t n = how->width, of = how->of;
    float buffer[ROW];
    EXPECT(is_written(how->to) && is_read(of), OTHER_DTYPE);
    EXPECT(how->rows >= 0 && n >= 0, OTHER_SIZE);
    for (int64_t row = 0; row < how->rows; row++) {
        float sum = 0;
        for (int64_t start = 0; start < n; start += ROW) {
            const int64_t part = n - start < ROW ? n - start : ROW;
            sum += sum_of(load(tensors[1] + (row * how->stride + start) * bytes_of(of), of, 1, part, buffer),
                part);
        }
        sum /= (float)n;
        store(tensors[0] + row * bytes_of(how->to), how->to, 1, 1, &sum);
    }
    return OK;
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
    const struct nc_norm *how;
    char *const *tensors;
    float epsilon;
    struct codes codes;
};

INLINE void any_norm_row(const struct norm *job, int64_t row)
{
    const int64_t n = job->how->width, to = job->how->to, from = job->how->of;
    const float *weight = (const float *)job->tensors[2], *bias = (const float *)job->tensors[3];
    char *y = job->tensors[0] + row * n * bytes_of(to), *x = job->tensors[1] + row * n * bytes_of(from);
    float buffer[ROW], mean = 0, squares = 0;
    for (int64_t start = 0; job->how->centred && start < n; start += ROW) {
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
        if (is_code(to))
            store_codes(y + start, job->codes, part, buffer);
        else
            store(y + start * bytes_of(to), to, 1, part, buffer);
    }
}
FOR_EACH_CPU(void, norm_row, (const struct norm *job, int64_t row), (job, row))

static void norm_rows(void *data, int64_t part, int64_t parts)
{
    const struct norm *job = data;
    const int64_t rows = job->how->rows;
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        norm_row(job, row);
}

/* tensors: y and x, without gaps; weight and bias in fp32, or no address */
int nc_norm(const struct nc_norm *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_norm);
    struct norm job = {how, tensors, (float)how->epsilon, codes_of(how->to, how->inverse, how->zero_point)};
    EXPECT((is_written(how->to) || is_code(how->to)) && is_read(how->of), OTHER_DTYPE);
    EXPECT(how->rows >= 0 && how->width >= 0, OTHER_SIZE);
    in_parts(norm_rows, &job, 1 + how->rows * how->width / 32768, how->threads);
    return OK;
}

struct summing {
    const struct nc_text_sums *how;
    char *const *tensors;
};

INLINE void any_sum_rows(const struct summing *job, int64_t text)
{
    const struct nc_text_sums *how = job->how;
    const int32_t *starts = (const int32_t *)job->tensors[2];
    float *y = (float *)job->tensors[0] + text * how->width;
    memset(y, 0, (size_t)how->width * 4);
    for (int64_t row = starts[text]; row < starts[text + 1]; row++) {
        const float *x = (const float *)job->tensors[1] + row * how->stride;
        if (how->step)
            for (int64_t i = 0; i < how->width; i++)
                y[i] += x[i];
        else
            for (int64_t i = 0; i < how->width; i++)
                y[i] += *x;
    }
}
FOR_EACH_CPU(void, sum_rows, (const struct summing *job, int64_t text), (job, text))

static void sum_texts(void *data, int64_t part, int64_t parts)
{
    const struct summing *job = data;
    const int64_t texts = job->how->texts;
    for (int64_t text = texts * part / parts; text < texts * (part + 1) / parts; text++)
        sum_rows(job, text);
}

/* tensors: y, without gaps; x; where each text begins, int32 */
int nc_text_sums(const struct nc_text_sums *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_text_sums);
    const struct summing job = {how, tensors};
    const int32_t *starts = (const int32_t *)tensors[2];
    EXPECT(how->texts >= 0 && how->width >= 0 && (how->step == 0 || how->step == 1), OTHER_SIZE);
    EXPECT(starts[0] == 0 && starts[how->texts] == how->rows, OTHER_SIZE);
    for (int64_t text = 0; text < how->texts; text++)
        EXPECT(starts[text] <= starts[text + 1], OTHER_SIZE);
    const int64_t worth = 1 + how->rows * how->width / 16384;
    in_parts(sum_texts, (void *)&job, worth < how->texts ? worth : how->texts, how->threads);
    return OK;
}

struct placing {
    const struct nc_place *how;
    char *const *tensors;
    _Atomic int outside; /* set by any thread */
};

static void place_rows(void *data, int64_t part, int64_t parts)
{
    struct placing *job = data;
    const struct nc_place *how = job->how;
    const int64_t *indices = (const int64_t *)job->tensors[2];
    for (int64_t row = how->rows * part / parts; row < how->rows * (part + 1) / parts; row++) {
        const int64_t place = indices[how->one_index ? 0 : row];
        char *y = job->tensors[0] + row * how->y_stride, *x = job->tensors[1] + row * how->x_stride;
        if (place < 0 || place >= how->places) {
            job->outside = 1;
            return;
        }
        memcpy(y + (how->scatters ? place * how->place_stride : 0),
            x + (how->scatters ? 0 : place * how->place_stride), how->bytes);
    }
}

/* tensors: y, x, int64 indices. Returns OTHER_INDEX where an index is none of the places. */
int nc_place(const struct nc_place *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_place);
    struct placing job = {how, tensors, 0};
    EXPECT(how->bytes >= 0 && how->rows >= 0, OTHER_SIZE);
    /* rows that go to one place do so in their order */
    const int64_t worth = how->scatters ? 1 : 1 + how->rows * how->bytes / 16384;
    in_parts(place_rows, &job, worth < how->rows ? worth : how->rows, how->threads);
    return job.outside ? OTHER_INDEX : OK;
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

/* What a float mask adds for places that hold nothing, and lower numbers: a score of up to 1e29 does not change
 * them, so it is not computed. */
#define HIDDEN -1e37f
#define AHEAD 16 /* keys that are asked for before they are read */

/* Elements from the first one of a tensor to that of row (i, j, k). */
INLINE int64_t place_of(const int64_t *strides, int64_t i, int64_t j, int64_t k)
{
    return i * strides[0] + j * strides[1] + k * strides[2];
}

struct attention {
    const struct nc_attention *how;
    char *const *tensors;
};

/* What the mask adds to a score at element m; -INFINITY where a bool hides it. */
INLINE float masked(const struct nc_attention *h, const char *mask, int64_t m)
{
    float added = 0;
    if (h->mask == MASK_BOOL)
        return ((const uint8_t *)mask)[m] ? 0 : -INFINITY;
    if (h->mask == MASK_FLOAT)
        added = *load(mask + m * bytes_of(h->mask_dtype), h->mask_dtype, 1, 1, &added);
    return added;
}

/* The keys of a query up to the last one that the mask does not hide; all where it hides all. */
INLINE int64_t seen_keys(const struct nc_attention *h, const char *mask, int64_t at)
{
    int64_t keys = h->mask == MASK_NONE ? 0 : h->keys;
    while (keys && masked(h, mask, at + (keys - 1) * h->mask_strides[3]) < HIDDEN)
        keys--;
    return keys ? keys : h->keys;
}

/* One query of a head: softmax(q K^T * factor + mask) V of its first keys, for ROW keys at a time; the largest
 * score so far is taken off all (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3). Returns that score. */
INLINE float attend_keys(const struct attention *job, int64_t batch, int64_t head, int64_t of_head,
    int64_t at, int64_t all)
{
    const struct nc_attention *h = job->how;
    const int64_t shared = head / h->group;
    const int64_t q_type = h->q_dtype, k_type = h->k_dtype, v_type = h->v_dtype, y_type = h->y_dtype;
    const int64_t k_row = h->k_strides[2] * bytes_of(k_type), v_row = h->v_strides[2] * bytes_of(v_type);
    const int64_t k_bytes = h->width * bytes_of(k_type), v_bytes = h->value_width * bytes_of(v_type);
    const char *keys =
        job->tensors[2] + (batch * h->k_strides[0] + shared * h->k_strides[1]) * bytes_of(k_type);
    const char *values =
        job->tensors[3] + (batch * h->v_strides[0] + shared * h->v_strides[1]) * bytes_of(v_type);
    const char *mask = job->tensors[4];
    const char *at_query = job->tensors[1] + place_of(h->q_strides, batch, head, of_head) * bytes_of(q_type);
    float query[ROW], row[ROW], sum[ROW] = {0}, largest = -INFINITY, total = 0;
    const float *q = load(at_query, q_type, 1, h->width, query), factor = (float)h->factor;
    for (int64_t start = 0; start < all; start += ROW) {
        const int64_t count = all - start < ROW ? all - start : ROW;
        float scores[ROW], most = largest;
        int unknown = 0; /* a score that is no number */
        for (int64_t i = 0; i < count; i++) {
            const int64_t j = start + i;
            const float added = masked(h, mask, at + j * h->mask_strides[3]);
            if (added < HIDDEN) {
                scores[i] = added;
            } else {
                const float *key = load(keys + j * k_row, k_type, 1, h->width, row);
                for (int64_t line = 0; line < k_bytes; line += 64)
                    __builtin_prefetch(keys + (j + AHEAD) * k_row + line);
                scores[i] = factor * dot(q, key, h->width) + added;
            }
            most = scores[i] > most ? scores[i] : most;
            unknown |= scores[i] != scores[i];
        }
        if (most == -INFINITY && !unknown) /* nothing is seen so far */
            continue;
        most = most == -INFINITY ? 0 : most;
        if (most > largest) {
            const float less = exponential(largest - most);
            scale(sum, less, h->value_width);
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
            const float *value = load(values + j * v_row, v_type, 1, h->value_width, row);
            for (int64_t line = 0; line < v_bytes; line += 64)
                __builtin_prefetch(values + (j + AHEAD) * v_row + line);
            add_scaled(sum, value, scores[i], h->value_width);
        }
    }
    if (total != 0) /* a query that sees no key gets zeros, as from torch */
        scale(sum, 1.0f / total, h->value_width);
    char *to = job->tensors[0] + place_of(h->y_strides, batch, head, of_head) * bytes_of(y_type);
    store(to, y_type, 1, h->value_width, sum);
    return largest;
}

INLINE void any_attend(const struct attention *job, int64_t task)
{
    const struct nc_attention *h = job->how;
    const int64_t of_head = task % h->rows, head = task / h->rows % h->heads,
        batch = task / h->rows / h->heads, at = place_of(h->mask_strides, batch, head, of_head);
    int64_t keys = seen_keys(h, job->tensors[4], at);
    /* where all that is seen has such a score, what a float hides counts, too */
    while (attend_keys(job, batch, head, of_head, at, keys) < HIDDEN && keys < h->keys)
        keys = h->keys;
}
FOR_EACH_CPU(void, attend, (const struct attention *job, int64_t task), (job, task))

static void attend_all(void *data, int64_t part, int64_t parts)
{
    const struct attention *job = data;
    const int64_t tasks = job->how->batch * job->how->heads * job->how->rows;
    for (int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; task++)
        attend(job, task);
}

/* tensors: y, q, k, v, mask (where there is one) */
int nc_attention(const struct nc_attention *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_attention);
    struct attention job = {how, tensors};
    const int64_t tasks = how->batch * how->heads * how->rows;
    /* as much work as a few thousand products is done before other threads wake up */
    const int64_t worth = 1 + tasks * how->keys * how->width / 65536;
    EXPECT(how->mask >= MASK_NONE && how->mask <= MASK_FLOAT, OTHER_OPERATION);
    EXPECT(how->mask == MASK_NONE || count == 5, OTHER_TENSORS);
    EXPECT(how->batch >= 0 && how->heads >= 0 && how->rows >= 0 && how->keys >= 0 && how->group > 0, OTHER_SIZE);
    EXPECT(how->width >= 0 && how->width <= ROW && how->value_width >= 0 && how->value_width <= ROW,
        OTHER_SIZE);
    EXPECT(is_read(how->q_dtype) && is_read(how->k_dtype) && is_read(how->v_dtype)
        && is_read(how->mask_dtype), OTHER_DTYPE);
    EXPECT(is_written(how->y_dtype), OTHER_DTYPE);
    in_parts(attend_all, &job, worth < tasks ? worth : tasks, how->threads);
    return OK;
}

struct rotation {
    const struct nc_rotary *how;
    char *const *tensors;
    struct codes codes;
};

INLINE void any_rotate_row(const struct rotation *job, int64_t row)
{
    const struct nc_rotary *how = job->how;
    const int64_t half = how->half, *sizes = how->sizes;
    const int64_t k = row % sizes[2], j = row / sizes[2] % sizes[1], i = row / sizes[2] / sizes[1];
    const float *x = (const float *)job->tensors[1] + place_of(how->x_strides, i, j, k);
    const float *cosine = (const float *)job->tensors[2] + place_of(how->cosine_strides, i, j, k);
    const float *sine = (const float *)job->tensors[3] + place_of(how->sine_strides, i, j, k);
    char *y = job->tensors[0] + place_of(how->y_strides, i, j, k) * bytes_of(how->to);
    float turned[ROW];
    for (int64_t n = 0; n < half; n++)
        turned[n] = x[n] * cosine[n] - x[half + n] * sine[n];
    for (int64_t n = 0; n < half; n++)
        turned[half + n] = x[half + n] * cosine[half + n] + x[n] * sine[half + n];
    if (how->to == DTYPE_F32)
        memcpy(y, turned, (size_t)(2 * half) * 4);
    else
        store_codes(y, job->codes, 2 * half, turned);
}
FOR_EACH_CPU(void, rotate_row, (const struct rotation *job, int64_t row), (job, row))

static void rotate_rows(void *data, int64_t part, int64_t parts)
{
    const struct rotation *job = data;
    const int64_t *sizes = job->how->sizes, rows = sizes[0] * sizes[1] * sizes[2];
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; row++)
        rotate_row(job, row);
}

/* y = x cos + (-second half of x, first half of x) sin. tensors: y; x, cos and sin in fp32 */
int nc_rotary(const struct nc_rotary *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_rotary);
    const int64_t *sizes = how->sizes;
    struct rotation job = {how, tensors, codes_of(how->to, how->inverse, how->zero_point)};
    EXPECT(how->to == DTYPE_F32 || is_code(how->to), OTHER_DTYPE);
    EXPECT(how->half >= 0 && 2 * how->half <= ROW, OTHER_SIZE);
    EXPECT(sizes[0] >= 0 && sizes[1] >= 0 && sizes[2] >= 0, OTHER_SIZE);
    in_parts(rotate_rows, &job, 1 + sizes[0] * sizes[1] * sizes[2] * how->half / 8192, how->threads);
    return OK;
}

enum { PIXELS = 256 }; /* of a channel that are quantized at once */

struct planes {
    const struct nc_codes *how;
    const float *x;
    char *y;
    struct codes codes;
};

INLINE void any_quantize_pixels(const struct planes *job, int64_t unit)
{
    const int64_t pixels = job->how->pixels, units = (pixels + PIXELS - 1) / PIXELS,
        start = unit % units * PIXELS;
    const int64_t n = pixels - start < PIXELS ? pixels - start : PIXELS, image = unit / units;
    char *restrict y = job->y + (image * pixels + start) * job->how->channels;
    char codes[3][PIXELS];
    if (job->how->channels == 1) {
        store_codes(y, job->codes, n, job->x + image * pixels + start);
        return;
    }
    for (int c = 0; c < 3; c++)
        store_codes(codes[c], job->codes, n, job->x + (image * 3 + c) * pixels + start);
    for (int64_t i = 0; i < n; i++) {
        y[3 * i] = codes[0][i];
        y[3 * i + 1] = codes[1][i];
        y[3 * i + 2] = codes[2][i];
    }
}
FOR_EACH_CPU(void, quantize_pixels, (const struct planes *job, int64_t unit), (job, unit))

static void quantize_planes(void *data, int64_t part, int64_t parts)
{
    const struct planes *job = data;
    const int64_t units = job->how->images * ((job->how->pixels + PIXELS - 1) / PIXELS);
    for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++)
        quantize_pixels(job, unit);
}

/* tensors: y, x */
int nc_codes(const struct nc_codes *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_codes);
    struct planes job = {how, (const float *)tensors[1], tensors[0],
        codes_of(how->to, how->inverse, how->zero_point)};
    EXPECT(is_code(how->to), OTHER_DTYPE);
    EXPECT(how->images >= 0 && how->pixels >= 0 && (how->channels == 1 || how->channels == 3), OTHER_SIZE);
    in_parts(quantize_planes, &job, 1 + how->images * how->channels * how->pixels / 24576, how->threads);
    return OK;
}

/* ---- images whose range is found in each call ---- */

#if CLONES
#define FOR_AVX512 FOR_CPU("avx512f")
#define FOR_AVX2 FOR_CPU("avx2")
#endif
#include "rounding.h"

struct rounding {
    const struct nc_round_images *how;
    const float *x;
    uint8_t *y;
    struct range *ranges; /* of each part */
    struct qparams as;
};

INLINE struct range any_range_of(const float *x, int64_t n)
{
    float low[32] = {0}, high[32] = {0};
    int unknown[32] = {0};
    struct range all = {0, 0};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int64_t j = 0; j < 32; j++) {
            low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
            high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
            unknown[j] |= x[i + j] != x[i + j];
        }
    for (; i < n; i++) {
        low[0] = x[i] < low[0] ? x[i] : low[0];
        high[0] = x[i] > high[0] ? x[i] : high[0];
        unknown[0] |= x[i] != x[i];
    }
    for (int64_t j = 0; j < 32; j++) {
        if (unknown[j])
            return (struct range){NAN, NAN};
        all.least = low[j] < all.least ? low[j] : all.least;
        all.most = high[j] > all.most ? high[j] : all.most;
    }
    return all;
}
FOR_EACH_CPU(struct range, range_of, (const float *x, int64_t n), (x, n))

static void measure_part(void *data, int64_t part, int64_t parts)
{
    const struct rounding *r = data;
    const int64_t n = r->how->images * r->how->channels * r->how->pixels, begin = n * part / parts;
    r->ranges[part] = range_of(r->x + begin, n * (part + 1) / parts - begin);
}

/* Scale and zero point of all parts. */
static void choose(struct rounding *r, int64_t parts)
{
    struct range all = {0, 0};
    for (int64_t part = 0; part < parts; part++)
        all = joined(all, r->ranges[part]);
    r->as = qparams_of(all, r->how->symmetric);
}

/* Codes of n numbers, as codes_of_16 gives them. */
static void encode_any(const struct rounding *r, const float *restrict x, uint8_t *restrict y, int64_t n)
{
    const float inverse = 1 / r->as.scale;
    for (int64_t i = 0; i < n; i++) {
        const float value = x[i] * inverse;
        float code = rintf(value);
        if (!(fabsf(value - code) < SURE))
            code = rintf(x[i] / r->as.scale);
        code += (float)r->as.zero_point;
        code = code > 0 ? code : 0;
        y[i] = (uint8_t)(int)(code < 255 ? code : 255);
    }
}

#if CLONES
FOR_AVX512 static void encode_512(const struct rounding *r, const float *x, uint8_t *y, int64_t n)
{
    const __m512 scale = _mm512_set1_ps(r->as.scale), inverse = _mm512_set1_ps(1 / r->as.scale),
                 zero_point = _mm512_set1_ps((float)r->as.zero_point);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i < 16 ? (__mmask16)((1 << (n - i)) - 1) : 0xffff;
        const __m512i codes = codes_of_16(_mm512_maskz_loadu_ps(mask, x + i), scale, inverse, zero_point);
        _mm512_mask_cvtusepi32_storeu_epi8(y + i, mask, codes);
    }
}

FOR_AVX2 static void encode_256(const struct rounding *r, const float *x, uint8_t *y, int64_t n)
{
    const __m256 by[] = {_mm256_set1_ps(r->as.scale), _mm256_set1_ps(1 / r->as.scale),
        _mm256_set1_ps((float)r->as.zero_point)};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i codes[4];
        for (int part = 0; part < 4; part++)
            codes[part] = codes_of_8(_mm256_loadu_ps(x + i + 8 * part), by[0], by[1], by[2]);
        const __m256i low = _mm256_packs_epi32(codes[0], codes[1]),
                      high = _mm256_packs_epi32(codes[2], codes[3]);
        /* packed within halves: their words of 4 codes go back into order */
        _mm256_storeu_si256((__m256i *)(y + i),
            _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
    encode_any(r, x + i, y + i, n - i);
}
#endif

static void encode(const struct rounding *r, const float *x, uint8_t *y, int64_t n)
{
#if CLONES
    const int64_t isa = nc_step_isa();
    if (isa == ISA_AVX512)
        encode_512(r, x, y, n);
    else if (isa == ISA_AVX2)
        encode_256(r, x, y, n);
    else
#endif
        encode_any(r, x, y, n);
}

static void encode_flat(void *data, int64_t part, int64_t parts)
{
    const struct rounding *r = data;
    const int64_t n = r->how->images * r->how->channels * r->how->pixels, begin = n * part / parts;
    encode(r, r->x + begin, r->y + begin, n * (part + 1) / parts - begin);
}

/* Codes of images whose pixels lie next to each other, with the channels next to each other. */
static void encode_turned(void *data, int64_t part, int64_t parts)
{
    const struct rounding *r = data;
    const int64_t pixels = r->how->pixels, channels = r->how->channels, each = (pixels + PIXELS - 1) / PIXELS,
        units = r->how->images * each;
    for (int64_t unit = units * part / parts; unit < units * (part + 1) / parts; unit++) {
        const int64_t image = unit / each, start = unit % each * PIXELS;
        const int64_t n = pixels - start < PIXELS ? pixels - start : PIXELS;
        uint8_t *y = r->y + (image * pixels + start) * channels, codes[PIXELS];
        for (int64_t c = 0; c < channels; c++) {
            encode(r, r->x + (image * channels + c) * pixels + start, codes, n);
            for (int64_t i = 0; i < n; i++)
                y[i * channels + c] = codes[i];
        }
    }
}

/* tensors: y; scale (fp32) and zero point (int32), one behind the other; x; memory for a range of each
 * thread */
int nc_round_images(const struct nc_round_images *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_round_images);
    EXPECT(how->images >= 0 && how->channels >= 0 && how->pixels >= 0 && how->threads > 0, OTHER_SIZE);
    struct rounding r = {.how = how, .y = (uint8_t *)tensors[0], .x = (const float *)tensors[2],
        .ranges = (struct range *)tensors[3]};
    const int64_t worth = 1 + how->images * how->channels * how->pixels / 16384,
        parts = worth < how->threads && gomp_parallel ? worth : gomp_parallel ? how->threads : 1;
    in_parts(measure_part, &r, parts, how->threads);
    choose(&r, parts);
    memcpy(tensors[1], &r.as.scale, 4);
    memcpy(tensors[1] + 4, &r.as.zero_point, 4);
    in_parts(how->channels_last ? encode_flat : encode_turned, &r, parts, how->threads);
    return OK;
}

/* tensors: y, scale */
int nc_spoil(const struct nc_spoil *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_spoil);
    EXPECT(how->elements >= 0, OTHER_SIZE);
    float scale;
    memcpy(&scale, tensors[1], 4);
    for (int64_t i = 0; scale != scale && i < how->elements; i++)
        ((float *)tensors[0])[i] = NAN;
    return OK;
}

/* Each function has code for any CPU besides. */
int64_t nc_isas(void) { return CLONES; }
int64_t nc_written_for(void) { return 1 << ISA_AVX2 | 1 << ISA_AVX512; }
