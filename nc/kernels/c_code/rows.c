/* Linears of rows that are rounded in each call: to codes with a scale and a zero point for each row, or to
 * bf16.
 *
 * `round_rows` measures rows of fp32, each alone or all together, and rounds them to uint8, as
 * nc.numerics.affine does. `row_product` multiplies them with int8 weights, sums exactly in int32, and gives
 *
 *     y = activation(row scale * scale * (sum - zero point * sum of weights) + bias) + added
 *
 * Rounded rows lie in tile order: [rows / 16][K / 64][16 rows][64], and behind them a scale (fp32) and a zero
 * point (int32) for each row. Weights likewise: [outputs / 16][K / 64][16][16 outputs][4], so that 64 bytes
 * are what one instruction multiplies. K is filled up with zeros.
 *
 * `bf16_rows` rounds rows to bf16 instead, and `row_product` sums their products with weights of bf16 in fp32:
 *
 *     y = activation(bf16(sum + bias)) + added
 *
 * They lie likewise: [rows / 16][K / 32][16 rows][32], and [outputs / 16][K / 32][16][16 outputs][2].
 *
 * `code_product` multiplies rows of codes that all have one scale and one zero point, one row behind the
 * other, with the same weights, and gives
 *
 *     y = activation(scale * (sum - zero point * sum of weights) + bias + what is added)
 *
 * in fp32 or in codes.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "caches.h"
#include "calls.h"
#include "isa.h"
#include "openmp.h"
#include "tiles.h"

#define FOR_VNNI FOR_CPU("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")
#define VNNI_INLINE static inline __attribute__((always_inline)) FOR_VNNI
#define UNROLL _Pragma("GCC unroll 16")
#define FOR_AVX512 FOR_VNNI
#include "exponential.h"
#include "bf16.h"
#include "by_activation.h"
#include "gelu.h"
#define FOR_AVX2 FOR_CPU("avx2,fma")
#include "rounding.h"
/* AT_ONCE: rows whose sums with two panels are in registers. */
enum { TILE = 16, DEPTH = 64, AT_ONCE = 8 };

#define FOR_AMX FOR_CPU("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8,amx-bf16")
#if HAS_BF16
#define FOR_BF16 FOR_CPU("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
#else
#define FOR_BF16 FOR_VNNI
#endif

CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX_VNNI | 1 << ISA_AVX512_VNNI | 1 << ISA_AVX512_BF16 | 1 << ISA_AMX)

int nc_rows_amx(void) { return HAS_AMX && may_use_tiles(); }

static int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

/* ---- rounding ---- */

struct rounding {
    const float *x;
    uint8_t *codes;
    float *scale;
    int32_t *zero_point;
    int64_t rows, inputs, stride, symmetric, bf16, wide; /* wide: with 512-bit registers */
    struct range *ranges; /* of each row, where all have one range together */
};

static struct range range_of(float least, float most, int no_numbers)
{
    return no_numbers ? (struct range){NAN, NAN} : (struct range){least, most};
}

/* Notes scale and zero point of a row. */
static void note_range(const struct rounding *r, int64_t row, struct range range)
{
    const struct qparams found = qparams_of(range, r->symmetric);
    r->scale[row] = found.scale;
    r->zero_point[row] = found.zero_point;
}

VNNI_INLINE __m512 some(const float *x, int64_t n)
{
    return n >= 16 ? _mm512_loadu_ps(x) : _mm512_maskz_loadu_ps((__mmask16)((1 << n) - 1), x);
}

FOR_VNNI static struct range measured(const struct rounding *r, const float *x)
{
    __m512 low = _mm512_setzero_ps(), high = low;
    __mmask16 no_numbers = 0;
    for (int64_t k = 0; k < r->inputs; k += 16) {
        const __m512 v = some(x + k, r->inputs - k);
        no_numbers |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        low = _mm512_min_ps(low, v);
        high = _mm512_max_ps(high, v);
    }
    return range_of(_mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high), no_numbers);
}

/* Codes of a row x whose scale and zero point are noted. */
FOR_VNNI static void encode(const struct rounding *r, const float *x, int64_t row)
{
    const int64_t depth = whole(r->inputs, DEPTH);
    uint8_t *to = r->codes + row / TILE * TILE * depth + row % TILE * DEPTH;
    const float scale = r->scale[row];
    const __m512 by = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1 / scale),
                 middle = _mm512_set1_ps((float)r->zero_point[row]);
    int64_t k = 0;
    for (; k < r->inputs; k += 16) {
        const __m512i codes = codes_of_16(some(x + k, r->inputs - k), by, inverse, middle);
        _mm_storeu_si128((__m128i *)(to + k / DEPTH * TILE * DEPTH + k % DEPTH),
            _mm512_cvtusepi32_epi8(codes));
    }
    for (; k < depth; k += 16)
        _mm_storeu_si128((__m128i *)(to + k / DEPTH * TILE * DEPTH + k % DEPTH), _mm_setzero_si128());
}

FOR_AVX2 static struct range measured_256(const struct rounding *r, const float *x);
FOR_AVX2 static void encode_256(const struct rounding *r, const float *x, int64_t row);

FOR_VNNI static void to_bf16(const struct rounding *r, const float *x, int64_t row)
{
    const int64_t depth = whole(2 * r->inputs, DEPTH);
    uint8_t *to = r->codes + row / TILE * TILE * depth + row % TILE * DEPTH;
    for (int64_t k = 0; k < depth / 2; k += 16) {
        const int64_t left = r->inputs - k;
        const __m512 v = left > 0 ? some(x + k, left) : _mm512_setzero_ps();
        _mm256_storeu_si256((__m256i *)(to + 2 * k / DEPTH * TILE * DEPTH + 2 * k % DEPTH),
            _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(v), 16)));
    }
}

static struct range range_of_row(const struct rounding *r, const float *x)
{
    return r->wide ? measured(r, x) : measured_256(r, x);
}

/* Rounds one row x; where all rows have one range, that is noted already. */
static void round_row(const struct rounding *r, const float *x, int64_t row)
{
    if (r->bf16) {
        to_bf16(r, x, row);
        return;
    }
    if (!r->ranges)
        note_range(r, row, range_of_row(r, x));
    if (r->wide)
        encode(r, x, row);
    else
        encode_256(r, x, row);
}

static void round_some(void *data, int64_t part, int64_t parts)
{
    const struct rounding *r = data;
    for (int64_t row = r->rows * part / parts; row < r->rows * (part + 1) / parts; row++)
        round_row(r, r->x + row * r->stride, row);
}

static void measure_some(void *data, int64_t part, int64_t parts)
{
    const struct rounding *r = data;
    for (int64_t row = r->rows * part / parts; row < r->rows * (part + 1) / parts; row++)
        r->ranges[row] = range_of_row(r, r->x + row * r->stride);
}

/* Notes one range for all rows. */
static void note_together(const struct rounding *r)
{
    struct range all = {0, 0};
    for (int64_t row = 0; row < r->rows; row++)
        all = joined(all, r->ranges[row]);
    for (int64_t row = 0; row < r->rows; row++)
        note_range(r, row, all);
}

static struct rounding rounding_of(char *codes, int64_t rows, int64_t inputs)
{
    const int64_t held = whole(rows, TILE), bytes = held * whole(inputs, DEPTH);
    return (struct rounding){.codes = (uint8_t *)codes, .scale = (float *)(codes + bytes),
        .zero_point = (int32_t *)(codes + bytes + held * 4), .rows = rows, .inputs = inputs};
}

static struct rounding rounding_by(struct rounding r, int64_t symmetric, int64_t bf16, int64_t isa)
{
    r.symmetric = symmetric;
    r.bf16 = bf16;
    r.wide = isa >= ISA_AVX512_VNNI;
    return r;
}

/* tensors: codes; fp32; without ranges of their own, memory for two numbers of each row */
int nc_round_rows(const struct nc_round_rows *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_round_rows);
    EXPECT(how->isa >= 0 && how->isa <= ISA_AMX && nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->stride >= how->inputs && how->threads > 0, OTHER_SIZE);
    EXPECT(count >= 2 + !how->per_row, OTHER_TENSORS);
    struct rounding r =
        rounding_by(rounding_of(tensors[0], how->rows, how->inputs), how->symmetric, 0, how->isa);
    r.x = (const float *)tensors[1];
    r.stride = how->stride;
    const int64_t parts = how->rows * how->inputs < WORK_PER_THREAD / 8 ? 1 : how->threads;
    if (!how->per_row) {
        r.ranges = (struct range *)tensors[2];
        in_parts(measure_some, &r, parts, how->threads);
        note_together(&r);
    }
    in_parts(round_some, &r, parts, how->threads);
    return OK;
}

int nc_bf16_rows(const struct nc_bf16_rows *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_bf16_rows);
    EXPECT(nc_may_use() >> ISA_AVX512_VNNI & 1, NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->stride >= how->inputs && how->threads > 0, OTHER_SIZE);
    struct rounding r = {.codes = (uint8_t *)tensors[0], .x = (const float *)tensors[1], .rows = how->rows,
        .inputs = how->inputs, .stride = how->stride, .bf16 = 1};
    in_parts(round_some, &r, how->rows * how->inputs < WORK_PER_THREAD / 8 ? 1 : how->threads, how->threads);
    return OK;
}

/* ---- norms ---- */

#include "row_norm.h"

/* What becomes of finished rows: perhaps a norm, and their rounding. */
struct followers {
    const float *weight, *bias; /* of the norm */
    double epsilon;
    int64_t norm;  /* NORM_... */
    float *normed; /* null: nothing else reads the result of the norm */
    struct rounding rounding;
};

static void follow(const struct followers *f, const float *x, int64_t row)
{
    float normed[MOST_NORMED];
    if (f->norm != NORM_NONE) {
        const int64_t n = f->rounding.inputs;
        float *to = f->normed ? f->normed + row * n : normed;
        norm_row(x, f->weight, f->bias, to, n, f->epsilon, f->norm == NORM_LAYER);
        x = to;
    }
    round_row(&f->rounding, x, row);
}

static void follow_some(void *data, int64_t part, int64_t parts)
{
    const struct followers *f = data;
    const struct rounding *r = &f->rounding;
    for (int64_t row = r->rows * part / parts; row < r->rows * (part + 1) / parts; row++)
        follow(f, r->x + row * r->stride, row);
}

/* What both functions with followers say of them. */
#define FOLLOWERS_OF(how, rounded, width, normed_rows, factors)                                    \
    {.normed = (float *)(normed_rows), .weight = (const float *)(factors)[0],                      \
     .bias = (const float *)(factors)[1], .epsilon = (how)->epsilon, .norm = (how)->norm,          \
     .rounding = rounding_by(rounding_of(rounded, (how)->rows, width), (how)->symmetric,           \
         (how)->bf16, (how)->isa)}

/* tensors: rounded rows; what the norm gives, or no address; x; weight and bias of the norm */
int nc_norm_rows(const struct nc_norm_rows *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_norm_rows);
    EXPECT(how->isa >= 0 && how->isa <= ISA_AMX && nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(!how->bf16 || nc_may_use() >> ISA_AVX512_VNNI & 1, NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->inputs <= MOST_NORMED, OTHER_SIZE);
    EXPECT(how->stride >= how->inputs && how->threads > 0, OTHER_SIZE);
    EXPECT(how->norm == NORM_LAYER || how->norm == NORM_RMS, OTHER_OPERATION);
    struct followers f = FOLLOWERS_OF(how, tensors[0], how->inputs, tensors[1], tensors + 3);
    f.rounding.x = (const float *)tensors[2];
    f.rounding.stride = how->stride;
    const int64_t parts = how->rows * how->inputs < WORK_PER_THREAD / 8 ? 1 : how->threads;
    in_parts(follow_some, &f, parts, how->threads);
    return OK;
}

/* ---- products ---- */

/* What a product multiplies: bytes of a row that are multiplied, and that its weights have; bytes from row to
 * row of 16, from 16 rows to the next ones, and from 64 bytes of a row to the next ones. */
struct operand {
    const uint8_t *x;
    int64_t used, depth, row, tile, block;
};

struct job {
    struct operand of;
    const float *row_scale;
    const int32_t *zero_point;
    const int8_t *weights;
    const int32_t *sums;
    const float *scale, *bias, *added;
    char *y;
    int64_t rows, outputs, activation, at_once, isa, bf16;
    float alpha, beta;
    const struct nc_code_product *codes; /* null: rows have ranges of their own, or are bf16 */
    int64_t plain; /* see is_plain */
};

static inline const uint8_t *row_of(const struct operand *of, int64_t row)
{
    const uint64_t n = (uint64_t)row; /* no sign to look at */
    return of->x + n / TILE * (uint64_t)of->tile + n % TILE * (uint64_t)of->row;
}

/* Addresses of `count` rows from `row` on. */
static inline __attribute__((always_inline)) void rows_of(const struct operand *of, int64_t row,
    const uint8_t **x, const int count)
{
    const int even = of->tile == TILE * of->row;
    x[0] = row_of(of, row);
    UNROLL for (int r = 1; r < count; r++)
        x[r] = even ? x[0] + r * of->row : row_of(of, row + r);
}

/* 1 / x, of the quotient's first bits and a step of Newton's method: 2^-23 of it are lost at most. */
VNNI_INLINE __m512 reciprocal(__m512 x)
{
    const __m512 first = _mm512_rcp14_ps(x);
    return _mm512_mul_ps(first, _mm512_fnmadd_ps(x, first, _mm512_set1_ps(2.0f)));
}

/* x / (1 + e^-z) */
VNNI_INLINE __m512 gated(__m512 x, __m512 z)
{
    const __m512 one = _mm512_set1_ps(1.0f),
                 e = exponential_of_16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(z)));
    const __mmask16 negative = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OS);
    /* for z < 0 it is x * e / (1 + e), e^-|z| */
    return _mm512_mul_ps(_mm512_mask_mul_ps(x, negative, x, e), reciprocal(_mm512_add_ps(one, e)));
}

static const float of_erf[][GELU_PIECES] = GELU_TAIL_ERF, of_tanh[][GELU_PIECES] = GELU_TAIL_TANH;

VNNI_INLINE __m512 activation(const int64_t op, __m512 v, float alpha, float beta)
{
    const __m512 zero = _mm512_setzero_ps(), a = _mm512_set1_ps(alpha), b = _mm512_set1_ps(beta);
    switch (op) {
    case ACTIVATION_RELU: return _mm512_max_ps(zero, v); /* what is no number stays so */
    case ACTIVATION_LEAKY_RELU:
        return _mm512_mask_mul_ps(v, _mm512_cmp_ps_mask(v, zero, _CMP_LE_OS), v, a);
    case ACTIVATION_CLIP: return _mm512_min_ps(b, _mm512_max_ps(a, v));
    case ACTIVATION_HARDSWISH:
        return _mm512_mul_ps(v,
            _mm512_min_ps(_mm512_set1_ps(1.0f), _mm512_max_ps(zero, _mm512_fmadd_ps(v, a, b))));
    case ACTIVATION_SWISH: return gated(v, _mm512_mul_ps(v, a));
    case ACTIVATION_GELU_TANH: return gelu_of_16(v, of_tanh);
    case ACTIVATION_GELU_ERF: return gelu_of_16(v, of_erf);
    default: return v;
    }
}

/* The first of 16 lanes, as many as there are outputs from `column` on. */
static __mmask16 lanes(const struct job *j, int64_t column)
{
    const int64_t left = j->outputs - column;
    return left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
}

/* 16 sums of a row → results from output `column` on. */
VNNI_INLINE void finish(const struct job *j, const int64_t op, __m512i sum, int64_t row, int64_t column)
{
    const int64_t at = row * j->outputs + column;
    const __mmask16 mask = lanes(j, column);
    const __m512 bias = _mm512_loadu_ps(j->bias + column);
    __m512 v;
    if (j->bf16)
        v = near_bf16(_mm512_add_ps(_mm512_castsi512_ps(sum), bias));
    else {
        sum = _mm512_sub_epi32(sum,
            _mm512_mullo_epi32(_mm512_set1_epi32(j->zero_point[row]), _mm512_loadu_si512(j->sums + column)));
        v = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(j->row_scale[row]));
        v = _mm512_fmadd_ps(v, _mm512_loadu_ps(j->scale + column), bias);
    }
    v = activation(op, v, j->alpha, j->beta);
    if (j->added)
        v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, j->added + at));
    _mm512_mask_storeu_ps((float *)j->y + at, mask, v);
}

/* What makes the results of `code_product`, in registers: stores of codes could change the job. */
struct after {
    __m512 added_scale, added_zero_point, inverse, zero_point, low, high;
    __m128i sign; /* the bits in which codes differ from uint8 */
    const float *other;
    char *y;
    float alpha, beta;
    int64_t added, to, outputs;
};

VNNI_INLINE struct after after_of(const struct job *j)
{
    const struct nc_code_product *how = j->codes;
    return (struct after){_mm512_set1_ps((float)how->added_scale),
        _mm512_set1_ps((float)how->added_zero_point), _mm512_set1_ps((float)how->inverse),
        _mm512_set1_ps((float)how->zero_point), _mm512_set1_ps(j->alpha), _mm512_set1_ps(j->beta),
        _mm_set1_epi8(how->to == DTYPE_S8 ? (char)0x80 : 0), j->added, j->y, j->alpha, j->beta, how->added,
        how->to, j->outputs};
}

/* 16 sums, by scale and bias, with what is added to results from element `at` of y on. */
VNNI_INLINE __m512 added_to(const struct after *a, __m512i sum, __m512 scale, __m512 bias, int64_t at,
    __mmask16 mask)
{
    const __m512 v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, bias);
    if (a->added == ADDED_NOTHING)
        return v;
    if (a->added == ADDED_CODES_IN_PLACE) {
        const __m512 old = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, a->y + at)));
        return _mm512_fmadd_ps(_mm512_sub_ps(old, a->added_zero_point), a->added_scale, v);
    }
    const float *more = a->added == ADDED_FP32_OTHER ? a->other : (const float *)a->y;
    return _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, more + at), a->added_scale, v);
}

/* Numbers up to 255 become codes; what is negative or no number becomes 0. */
VNNI_INLINE void store_codes(const struct after *a, __m512 v, int64_t at, __mmask16 mask)
{
    const __m512i codes = _mm512_max_epi32(_mm512_cvtps_epi32(v), _mm512_setzero_si512());
    _mm_mask_storeu_epi8(a->y + at, mask, _mm_xor_si128(_mm512_cvtepi32_epi8(codes), a->sign));
}

VNNI_INLINE void finish_codes(const struct after *a, const int64_t op, __m512i sum, __m512 scale, __m512 bias,
    int64_t at, __mmask16 mask)
{
    const __m512 v = activation(op, added_to(a, sum, scale, bias, at, mask), a->alpha, a->beta);
    if (a->to == DTYPE_F32)
        _mm512_mask_storeu_ps((float *)a->y + at, mask, v);
    else
        store_codes(a, _mm512_min_ps(_mm512_set1_ps(255.0f), _mm512_fmadd_ps(v, a->inverse, a->zero_point)), at,
            mask);
}

/* The same where nothing but bounds follows: `is_plain`. */
VNNI_INLINE void finish_plain(const struct after *a, __m512i sum, __m512 scale, __m512 bias, int64_t at,
    __mmask16 mask)
{
    const __m512 v = added_to(a, sum, scale, bias, at, mask);
    if (a->to == DTYPE_F32)
        _mm512_mask_storeu_ps((float *)a->y + at, mask, v);
    else
        store_codes(a, _mm512_min_ps(a->high, _mm512_max_ps(a->low, v)), at, mask);
}

/* Whether results are sums by a scale and a bias: in fp32, or as codes between two bounds. */
static int64_t is_plain(const struct nc_code_product *how)
{
    if (how->to == DTYPE_F32)
        return how->activation == ACTIVATION_IDENTITY;
    return how->activation == ACTIVATION_CLIP && how->inverse == 1 && how->zero_point == 0 && how->beta <= 255;
}

FOR_VNNI static void finish_block_of_codes(const struct job *j, int32_t (*sums)[2 * TILE][TILE], int64_t row,
    int64_t rows, int64_t panel, int64_t panels)
{
    const struct after a = after_of(j);
    for (int64_t p = 0; p < panels; p++) {
        const int64_t column = (panel + p) * TILE, first = row * a.outputs + column;
        const __m512i init = _mm512_loadu_si512(j->sums + column);
        const __m512 scale = _mm512_loadu_ps(j->scale + column), bias = _mm512_loadu_ps(j->bias + column);
        const __mmask16 mask = lanes(j, column);
#define EACH(finished, ...)                                                                        \
    for (int64_t r = 0; r < rows; r++)                                                             \
        finished(__VA_ARGS__, _mm512_add_epi32(_mm512_loadu_si512(sums[p][r]), init), scale, bias, \
            first + r * a.outputs, mask)
#define ALL(op) EACH(finish_codes, &a, op)
        if (j->plain)
            EACH(finish_plain, &a);
        else
            BY_ACTIVATION(j->activation, ALL)
#undef ALL
#undef EACH
    }
}

/* Sums [panels][rows][16] → results. */
FOR_VNNI static void finish_block(const struct job *j, int32_t (*sums)[2 * TILE][TILE], int64_t row,
    int64_t rows, int64_t panel, int64_t panels)
{
    if (j->codes) {
        finish_block_of_codes(j, sums, row, rows, panel, panels);
        return;
    }
#define ALL(op)                                                                     \
    for (int64_t p = 0; p < panels; p++)                                            \
        for (int64_t r = 0; r < rows; r++)                                          \
            finish(j, op, _mm512_loadu_si512(sums[p][r]), row + r, (panel + p) * TILE)
    BY_ACTIVATION(j->activation, ALL)
#undef ALL
}

/* sums + products of 64 codes four by four, or of 32 numbers of bf16 two by two. */
VNNI_INLINE __m512i add_products(__m512i sums, __m512i x, __m512i w, const int bf16)
{
#if HAS_BF16
    if (bf16) {
        VDPBF16PS_512(sums, x, w);
        return sums;
    }
#endif
    return _mm512_dpbusd_epi32(sums, x, w);
}

/* What `multiply_rows` does. */
enum kind { SUMS_OF_CODES, SUMS_OF_BF16, PLAIN_CODES };

/* R rows from `row` on and P panels: their sums, or where `kind` is PLAIN_CODES their results. */
VNNI_INLINE void multiply_rows(const struct job *j, int64_t row, int64_t panel,
    int32_t (*sums)[2 * TILE][TILE], int64_t first, const int R, const int P, const enum kind kind)
{
    const struct operand *of = &j->of;
    const int8_t *left = j->weights + panel * TILE * of->depth, *right = left + TILE * of->depth;
    const uint8_t *x[AT_ONCE];
    __m512i sum[AT_ONCE][2];
    rows_of(of, row, x, R);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < P; p++)
            sum[r][p] = kind == PLAIN_CODES ? _mm512_loadu_si512(j->sums + (panel + p) * TILE)
                                            : _mm512_setzero_si512();
    for (int64_t k = 0, begin = 0; k < of->used; k += DEPTH, begin += of->block) {
        const int64_t end = of->used - k < DEPTH ? of->used - k : DEPTH;
        for (int64_t at = 0; at < end; at += 4) {
            const __m512i w0 = _mm512_loadu_si512(left + (k + at) * TILE);
            const __m512i w1 = P > 1 ? _mm512_loadu_si512(right + (k + at) * TILE) : w0;
            UNROLL for (int r = 0; r < R; r++)
            {
                int32_t four;
                memcpy(&four, x[r] + begin + at, 4);
                const __m512i codes = _mm512_set1_epi32(four);
                sum[r][0] = add_products(sum[r][0], codes, w0, kind == SUMS_OF_BF16);
                if (P > 1)
                    sum[r][1] = add_products(sum[r][1], codes, w1, kind == SUMS_OF_BF16);
            }
        }
    }
    if (kind != PLAIN_CODES) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int p = 0; p < P; p++)
                _mm512_storeu_si512(sums[p][first + r], sum[r][p]);
        return;
    }
    const struct after a = after_of(j);
    UNROLL for (int p = 0; p < P; p++)
    {
        const int64_t column = (panel + p) * TILE;
        const __m512 scale = _mm512_loadu_ps(j->scale + column), bias = _mm512_loadu_ps(j->bias + column);
        const __mmask16 mask = lanes(j, column);
        UNROLL for (int r = 0; r < R; r++)
            finish_plain(&a, sum[r][p], scale, bias, (row + r) * a.outputs + column, mask);
    }
}

VNNI_INLINE void block_of_panels(const struct job *j, int64_t row, int64_t rows, int64_t panel, const int P,
    const enum kind kind)
{
    int32_t sums[2][2 * TILE][TILE];
    int64_t done = 0;
    for (; done + AT_ONCE <= rows; done += AT_ONCE)
        multiply_rows(j, row + done, panel, sums, done, AT_ONCE, P, kind);
    for (; done + 4 <= rows; done += 4)
        multiply_rows(j, row + done, panel, sums, done, 4, P, kind);
    for (; done + 2 <= rows; done += 2)
        multiply_rows(j, row + done, panel, sums, done, 2, P, kind);
    for (; done < rows; done++)
        multiply_rows(j, row + done, panel, sums, done, 1, P, kind);
    if (kind != PLAIN_CODES)
        finish_block(j, sums, row, rows, panel, P);
}

/* Weights are filled up to pairs of panels; one that has no output is left out. */
VNNI_INLINE void block(const struct job *j, int64_t row, int64_t rows, int64_t panel, const enum kind kind)
{
    if (j->outputs > (panel + 1) * TILE)
        block_of_panels(j, row, rows, panel, 2, kind);
    else
        block_of_panels(j, row, rows, panel, 1, kind);
}

FOR_VNNI static void block_vnni(const struct job *j, int64_t row, int64_t rows, int64_t panel)
{
    block(j, row, rows, panel, SUMS_OF_CODES);
}

FOR_VNNI static void plain_vnni(const struct job *j, int64_t row, int64_t rows, int64_t panel)
{
    block(j, row, rows, panel, PLAIN_CODES);
}

FOR_BF16 static void block_bf16(const struct job *j, int64_t row, int64_t rows, int64_t panel)
{
    block(j, row, rows, panel, SUMS_OF_BF16);
}

#if HAS_AMX
/* Tiles of `rows` rows, up to 32, that lie below each other: sums in 0 to 3, codes in 4 and 5; weights in 6 and
 * 7. */
FOR_AMX static void configure(int64_t rows)
{
    struct tiles t = {.palette = 1};
    const int64_t upper = rows < TILE ? rows : TILE, lower = rows > TILE ? rows - TILE : TILE;
    const int64_t of_tiles[] = {upper, upper, lower, lower, upper, lower, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        t.bytes[i] = 64;
        t.rows[i] = (uint8_t)of_tiles[i];
    }
    WRITTEN();
    _tile_loadconfig(&t);
}

#define MULTIPLY(to, x, w)           \
    do {                             \
        if (bf16)                    \
            _tile_dpbf16ps(to, x, w);\
        else                         \
            _tile_dpbusd(to, x, w);  \
    } while (0)

/* Up to 32 rows and two panels: sums in four tiles. The weights of the next two panels are fetched a part at
 * each step, `step` of `steps`. */
static inline __attribute__((always_inline)) FOR_AMX void block_amx(const struct job *j, int64_t row,
    int64_t rows, int64_t panel, int64_t step, int64_t steps, const int bf16)
{
    _Alignas(64) int32_t sums[2][2 * TILE][TILE];
    const struct operand *of = &j->of;
    const int64_t blocks = of->depth / DEPTH, whole_tile = TILE * DEPTH, apart = of->row;
    const int8_t *left = j->weights + panel * TILE * of->depth, *right = left + TILE * of->depth;
    const char *next = (const char *)(right + TILE * of->depth);
    const uint8_t *x = row_of(of, row), *lower = x + of->tile;
    const int64_t from = step * TILE / steps, to = (step + 1) * TILE / steps;
    _tile_zero(0);
    _tile_zero(1);
    if (rows > TILE) {
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < blocks; i++) {
            _tile_loadd(4, x + i * of->block, apart);
            _tile_loadd(6, left + i * whole_tile, DEPTH);
            MULTIPLY(0, 4, 6);
            _tile_loadd(7, right + i * whole_tile, DEPTH);
            MULTIPLY(1, 4, 7);
            _tile_loadd(5, lower + i * of->block, apart);
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
            for (int64_t q = from; q < to; q++) {
                _mm_prefetch(next + i * whole_tile + q * 64, _MM_HINT_T1);
                _mm_prefetch(next + (blocks + i) * whole_tile + q * 64, _MM_HINT_T1);
            }
        }
        _tile_stored(2, sums[0][TILE], 64);
        _tile_stored(3, sums[1][TILE], 64);
    } else {
        for (int64_t i = 0; i < blocks; i++) {
            _tile_loadd(4, x + i * of->block, apart);
            _tile_loadd(6, left + i * whole_tile, DEPTH);
            MULTIPLY(0, 4, 6);
            _tile_loadd(7, right + i * whole_tile, DEPTH);
            MULTIPLY(1, 4, 7);
        }
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[1][0], 64);
    finish_block(j, sums, row, rows, panel, 2);
}

FOR_AMX static void pairs_amx(const struct job *j, int64_t first, int64_t last, int64_t from, int64_t to)
{
    int64_t configured = 0;
    for (int64_t pair = from; pair < to; pair++) {
        const int64_t steps = (last - first + 2 * TILE - 1) / (2 * TILE);
        for (int64_t row = first, step = 0; row < last; row += 2 * TILE, step++) {
            const int64_t rows = last - row < 2 * TILE ? last - row : 2 * TILE;
            const int64_t in_memory = j->codes ? rows : 2 * TILE; /* rounded rows are filled up to a tile */
            if (in_memory != configured)
                configure(configured = in_memory);
            if (j->bf16)
                block_amx(j, row, rows, 2 * pair, step, steps, 1);
            else
                block_amx(j, row, rows, 2 * pair, step, steps, 0);
        }
    }
    _tile_release();
}
#endif

#include "rows_256.h"

static void pairs_of_rows(const struct job *j, int64_t first, int64_t last, int64_t from, int64_t to)
{
    if (j->isa < ISA_AVX512_VNNI) {
        pairs_of_rows_256(j, first, last, from, to);
        return;
    }
    for (int64_t pair = from; pair < to; pair++)
        for (int64_t row = first; row < last; row += 2 * TILE) {
            const int64_t rows = last - row < 2 * TILE ? last - row : 2 * TILE;
            if (j->bf16)
                block_bf16(j, row, rows, 2 * pair);
            else if (j->plain)
                plain_vnni(j, row, rows, 2 * pair);
            else
                block_vnni(j, row, rows, 2 * pair);
        }
}

/* Rows that fill less than half a piece go with the one in front of them: each piece reads all weights. */
static int64_t pieces_of(const struct job *j)
{
    const int64_t pieces = (j->rows + j->at_once / 2) / j->at_once;
    return pieces ? pieces : 1;
}

/* Rows `first` to `last` with pairs of panels `from` to `to`. */
static void multiply_piece(const struct job *j, int64_t first, int64_t last, int64_t from, int64_t to)
{
#if HAS_AMX
    if (j->isa == ISA_AMX) {
        pairs_amx(j, first, last, from, to);
        return;
    }
#endif
    pairs_of_rows(j, first, last, from, to);
}

/* Threads share pairs of panels, and pieces of rows where there are fewer pairs. */
static void multiply_some(void *data, int64_t part, int64_t parts)
{
    const struct job *j = data;
    const int64_t pairs = whole(j->outputs, 2 * TILE) / (2 * TILE);
    const int64_t pieces = pieces_of(j), units = pieces * pairs;
    for (int64_t unit = units * part / parts, end = units * (part + 1) / parts; unit < end;) {
        const int64_t piece = unit / pairs, from = unit % pairs;
        const int64_t to = end - unit < pairs - from ? from + end - unit : pairs;
        const int64_t first = piece * j->at_once;
        const int64_t last = piece + 1 < pieces ? first + j->at_once : j->rows;
        multiply_piece(j, first, last, from, to);
        unit += to - from;
    }
}

/* The products, on up to so many threads. */
static int multiply_all(struct job *j, int64_t threads)
{
    if (!j->rows)
        return OK;
    const int64_t pairs = whole(j->outputs, 2 * TILE) / (2 * TILE), depth = j->of.depth;
    /* a piece of rows stays in the second cache, beside its weights and results; AMX needs more rows for the
     * time that its weights take */
    const int64_t fit = second_cache() / 2 / depth,
                  wanted = j->isa == ISA_AMX ? 8 * ROWS_OF_PIECE : ROWS_OF_PIECE;
    const int64_t rows_of_piece = j->rows <= 4 * ROWS_OF_PIECE || fit < wanted ? fit : wanted;
    const int64_t most = whole(rows_of_piece > 0 ? rows_of_piece : 1, 2 * TILE); /* one row may not fit */
    j->at_once = most;
    const int64_t even = pieces_of(j);
    j->at_once = whole((j->rows + even - 1) / even, 2 * TILE);
    const int64_t shared = whole((j->rows * pairs + 2 * threads - 1) / (2 * threads), 2 * TILE);
    if (pairs < 2 * threads && shared < j->at_once)
        j->at_once = shared;
    const int64_t weights = depth * whole(j->outputs, 2 * TILE), units = pairs * pieces_of(j);
    /* products with a small weight take less time: it stays in the first caches */
    const int64_t worth = 1 + (weights < WORK_PER_THREAD ? weights * j->rows / (8 * WORK_PER_THREAD)
                                                         : weights / WORK_PER_THREAD * j->rows);
    const int64_t use = worth < threads ? worth : threads;
    in_parts(multiply_some, j, units < use ? units : use, threads);
    return OK;
}

/* Rows in tile order. */
static struct operand in_tiles(const uint8_t *x, int64_t depth)
{
    return (struct operand){.x = x, .used = depth, .depth = depth, .row = DEPTH, .tile = TILE * depth,
        .block = TILE * DEPTH};
}

/* Rows in memory that rounding wrote. */
static struct operand rounded_rows(char *memory, int64_t rows, int64_t inputs, int64_t bf16)
{
    return in_tiles(rounding_of(memory, rows, inputs).codes, whole((bf16 ? 2 : 1) * inputs, DEPTH));
}

/* A product of rounded rows; `factors`: the rows, weights, their sums, scale and bias. */
#define JOB_OF_ROWS(how, result, factors, other)                                                           \
    {.y = (result), .of = rounded_rows((factors)[0], (how)->rows, (how)->inputs, (how)->bf16),             \
     .row_scale = rounding_of((factors)[0], (how)->rows, (how)->inputs).scale,                             \
     .zero_point = rounding_of((factors)[0], (how)->rows, (how)->inputs).zero_point,                       \
     .weights = (const int8_t *)(factors)[1], .sums = (const int32_t *)(factors)[2],                       \
     .scale = (const float *)(factors)[3], .bias = (const float *)(factors)[4], .added = (other),          \
     .rows = (how)->rows, .bf16 = (how)->bf16 != 0, .outputs = (how)->outputs,                             \
     .activation = (how)->activation, .alpha = (float)(how)->alpha, .beta = (float)(how)->beta,            \
     .isa = (how)->isa}

static int has_product(int64_t isa, int64_t bf16)
{
    const int one = bf16 ? isa == ISA_AVX512_BF16
                         : isa == ISA_AVX2 || isa == ISA_AVX_VNNI || isa == ISA_AVX512_VNNI;
    return (one || isa == ISA_AMX) && nc_may_use() >> isa & 1;
}

int nc_row_product(const struct nc_row_product *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_row_product);
    EXPECT(has_product(how->isa, how->bf16), NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->outputs > 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->bf16 || how->inputs <= MOST_INPUTS, OTHER_SIZE); /* int32 holds their sums */
    EXPECT(how->activation >= ACTIVATION_IDENTITY && how->activation <= ACTIVATION_GELU_ERF, OTHER_OPERATION);
    struct job j = JOB_OF_ROWS(how, tensors[0], tensors + 1, count > 6 ? (const float *)tensors[6] : NULL);
    return multiply_all(&j, how->threads);
}

/* A product, and what becomes of its rows. */
struct chain {
    const struct job *product;
    const struct followers *followers;
    int64_t keeps; /* the results of the product: all of them, else those of a piece */
};

/* Threads share pieces of rows: a row is normed and rounded when it is in the cache. */
static void multiply_and_follow(void *data, int64_t part, int64_t parts)
{
    const struct chain *chain = data;
    const struct job *all = chain->product;
    const int64_t pieces = pieces_of(all), row_bytes = all->outputs * (int64_t)sizeof(float);
    for (int64_t piece = pieces * part / parts; piece < pieces * (part + 1) / parts; piece++) {
        const int64_t first = piece * all->at_once,
                      last = piece + 1 < pieces ? first + all->at_once : all->rows;
        struct job j = *all;
        /* results of a piece that nothing else reads lie where those of this thread's last piece lay */
        char *results = chain->keeps ? all->y + first * row_bytes : all->y + part * all->at_once * row_bytes;
        j.y = (char *)((uintptr_t)results - (uintptr_t)(first * row_bytes));
        multiply_piece(&j, first, last, 0, whole(j.outputs, 2 * TILE) / (2 * TILE));
        for (int64_t row = first; row < last; row++)
            follow(chain->followers, (const float *)results + (row - first) * all->outputs, row);
    }
}

/* tensors: rounded rows; results of the product, or memory for them; what the norm gives, or no address; as for
 * row_product, from the rows to what is added, or no address; weight and bias of the norm, or no address */
int nc_row_chain(const struct nc_row_chain *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_row_chain);
    EXPECT(has_product(how->isa, how->bf16), NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->outputs > 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->bf16 || how->inputs <= MOST_INPUTS, OTHER_SIZE); /* int32 holds their sums */
    EXPECT(how->norm == NORM_NONE || how->outputs <= MOST_NORMED, OTHER_SIZE);
    EXPECT(how->activation >= ACTIVATION_IDENTITY && how->activation <= ACTIVATION_GELU_ERF, OTHER_OPERATION);
    EXPECT(how->norm >= NORM_NONE && how->norm <= NORM_RMS, OTHER_OPERATION);
    struct followers f = FOLLOWERS_OF(how, tensors[0], how->outputs, tensors[2], tensors + 9);
    f.rounding.x = (const float *)tensors[1];
    f.rounding.stride = how->outputs;
    struct job j = JOB_OF_ROWS(how, tensors[1], tensors + 3, (const float *)tensors[8]);
    if (how->rows < PIECES_PER_THREAD * 2 * TILE * how->threads) {
        /* each thread would read all weights for few rows: they share the weights instead */
        const int status = multiply_all(&j, how->threads);
        EXPECT(status == OK, status);
        in_parts(follow_some, &f, how->threads, how->threads);
        return OK;
    }
    /* a piece and its results stay in the second cache */
    const int64_t fit = second_cache() / 2 / (j.of.depth + how->outputs * (int64_t)sizeof(float));
    j.at_once = whole(fit < ROWS_OF_PIECE ? (fit > 0 ? fit : 1) : ROWS_OF_PIECE, 2 * TILE);
    const struct chain chain = {&j, &f, how->keeps};
    in_parts(multiply_and_follow, (void *)&chain, pieces_of(&j), how->threads);
    return OK;
}

/* tensors: result, codes, weights, -zero point * sum of weights (int32), scale, bias (both fp32, all three by
 * outputs, filled up as the weights); what is added in fp32, if it is not in place */
int nc_code_product(const struct nc_code_product *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_code_product);
    EXPECT(how->isa == ISA_AVX2 || how->isa == ISA_AVX_VNNI || how->isa == ISA_AVX512_VNNI
        || how->isa == ISA_AMX, NOT_HERE);
    EXPECT(nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(how->rows >= 0 && how->inputs > 0 && how->inputs <= MOST_INPUTS && how->outputs > 0, OTHER_SIZE);
    EXPECT(how->inputs % (how->isa == ISA_AMX ? DEPTH : 4) == 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->to == DTYPE_U8 || how->to == DTYPE_S8 || how->to == DTYPE_F32, OTHER_DTYPE);
    EXPECT(how->added >= ADDED_NOTHING && how->added <= ADDED_FP32_OTHER, OTHER_OPERATION);
    EXPECT(how->activation >= ACTIVATION_IDENTITY && how->activation <= ACTIVATION_GELU_ERF, OTHER_OPERATION);
    EXPECT(how->added != ADDED_FP32_OTHER || count == 7, OTHER_TENSORS);
    const struct operand of = {.x = (const uint8_t *)tensors[1], .used = how->inputs,
        .depth = whole(how->inputs, DEPTH), .row = how->stride, .tile = TILE * how->stride, .block = DEPTH};
    struct job j = {.y = tensors[0], .of = of, .weights = (const int8_t *)tensors[2],
        .sums = (const int32_t *)tensors[3], .scale = (const float *)tensors[4],
        .bias = (const float *)tensors[5], .added = count > 6 ? (const float *)tensors[6] : NULL,
        .rows = how->rows, .outputs = how->outputs, .activation = how->activation,
        .alpha = (float)how->alpha, .beta = (float)how->beta, .isa = how->isa, .codes = how,
        .plain = is_plain(how)};
    return multiply_all(&j, how->threads);
}
