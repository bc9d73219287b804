/* How sums of products of codes become fp32 or codes, with 256-bit registers:
 *
 *     result = activation(scale * sum + bias + added_scale * (what is added - added_zero_point))
 *     code = round(result * inverse) + zero_point
 *
 * FOR_AVX2 and the tables of gelu.py, `of_erf` and `of_tanh`, are defined where this is included.
 */
#include "lanes_256.h"
#include "activation_256.h"
#include "by_activation.h"

/* What results are made of besides sums. */
struct after_256 {
    __m256 added_scale, added_zero_point, inverse, zero_point;
    const float *scale, *bias, *other;
    char *y;
    float alpha, beta;
    int64_t activation, added, to, outputs, sign; /* sign: the bits in which 8 codes differ from uint8 */
};

/* It, of a structure of abi.py that has the fields of a product. */
#define AFTER_256(how, y, scale, bias, other)                                                              \
    {_mm256_set1_ps((float)(how)->added_scale), _mm256_set1_ps((float)(how)->added_zero_point),            \
        _mm256_set1_ps((float)(how)->inverse), _mm256_set1_ps((float)(how)->zero_point), scale, bias,      \
        other, y, (float)(how)->alpha, (float)(how)->beta, (how)->activation, (how)->added, (how)->to,     \
        (how)->outputs, (how)->to == DTYPE_S8 ? (int64_t)0x8080808080808080 : 0}

/* 8 results in fp32, of `n` outputs, before they are quantized. */
AVX2_INLINE __m256 result_of_8(const struct after_256 *a, const int64_t op, __m256i sum, __m256 scale,
    __m256 bias, int64_t at, int64_t n)
{
    __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, bias);
    if (a->added == ADDED_CODES_IN_PLACE) {
        const __m256 old = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some_codes(a->y + at, n)));
        v = _mm256_fmadd_ps(_mm256_sub_ps(old, a->added_zero_point), a->added_scale, v);
    } else if (a->added != ADDED_NOTHING) {
        const float *more = a->added == ADDED_FP32_OTHER ? a->other : (const float *)a->y;
        v = _mm256_fmadd_ps(some_8(more + at, n), a->added_scale, v);
    }
    return activation_of_8(op, v, a->alpha, a->beta);
}

/* 8 codes as integers that packing saturates at 0; what is no number becomes the least one. */
AVX2_INLINE __m256i codes_of_results(const struct after_256 *a, __m256 v)
{
    return _mm256_cvtps_epi32(
        _mm256_min_ps(_mm256_set1_ps(255.0f), _mm256_fmadd_ps(v, a->inverse, a->zero_point)));
}

AVX2_INLINE void store_8(const struct after_256 *a, __m256 v, int64_t at, int64_t n)
{
    if (a->to == DTYPE_F32) {
        if (n >= WIDTH)
            _mm256_storeu_ps((float *)a->y + at, v);
        else
            _mm256_maskstore_ps((float *)a->y + at, first_of_8(n), v);
        return;
    }
    const __m256i wide = codes_of_results(a, v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    const int64_t codes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words)) ^ a->sign;
    if (n >= WIDTH)
        memcpy(a->y + at, &codes, WIDTH);
    else
        memcpy(a->y + at, &codes, (size_t)n);
}

AVX2_INLINE void store_16_codes(const struct after_256 *a, __m256 low, __m256 high, int64_t at)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
    const __m256i words = _mm256_packs_epi32(codes_of_results(a, low), codes_of_results(a, high));
    const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order);
    _mm_storeu_si128((__m128i *)(a->y + at),
        _mm_xor_si128(_mm256_castsi256_si128(codes), _mm_set1_epi64x(a->sign)));
}

/* Sums of rows → results of 8 outputs, or fewer, from `column` on; they begin at `begin` of the panel. */
AVX2_INLINE void finish_half(const struct after_256 *a, const int64_t op, int32_t (*sums)[PANEL],
    int64_t row, int64_t rows, int64_t column, int64_t begin)
{
    const int64_t n = a->outputs - column;
    const __m256 scale = _mm256_loadu_ps(a->scale + column), bias = _mm256_loadu_ps(a->bias + column);
    for (int64_t r = 0, at = row * a->outputs + column; n > 0 && r < rows; r++, at += a->outputs) {
        const __m256i sum = _mm256_loadu_si256((const __m256i *)(sums[r] + begin));
        store_8(a, result_of_8(a, op, sum, scale, bias, at, n), at, n);
    }
}

/* The same of 16 outputs as codes. */
AVX2_INLINE void finish_whole(const struct after_256 *a, const int64_t op, int32_t (*sums)[PANEL],
    int64_t row, int64_t rows, int64_t column)
{
    const __m256 scale = _mm256_loadu_ps(a->scale + column), bias = _mm256_loadu_ps(a->bias + column);
    const __m256 scale_2 = _mm256_loadu_ps(a->scale + column + WIDTH),
                 bias_2 = _mm256_loadu_ps(a->bias + column + WIDTH);
    for (int64_t r = 0, at = row * a->outputs + column; r < rows; r++, at += a->outputs) {
        const __m256i *both = (const __m256i *)sums[r];
        const __m256 low = result_of_8(a, op, _mm256_loadu_si256(both), scale, bias, at, WIDTH),
                     high = result_of_8(a, op, _mm256_loadu_si256(both + 1), scale_2, bias_2, at + WIDTH,
                         WIDTH);
        store_16_codes(a, low, high, at);
    }
}

/* Sums [rows][16] → results, from output `column` on. */
AVX2_INLINE void finish_rows_256(const struct after_256 *a, const int64_t op, int32_t (*sums)[PANEL],
    int64_t row, int64_t rows, int64_t column)
{
    if (a->outputs - column >= PANEL && a->to != DTYPE_F32) {
        finish_whole(a, op, sums, row, rows, column);
        return;
    }
    finish_half(a, op, sums, row, rows, column, 0);
    finish_half(a, op, sums, row, rows, column + WIDTH, WIDTH);
}

/* The same, with one loop for each activation. */
FOR_AVX2 static void finish_256(const struct after_256 *after, int32_t (*sums)[PANEL], int64_t row,
    int64_t rows, int64_t column)
{
    const struct after_256 a = *after; /* in registers: stores of codes could change the other one */
#define ALL(op) finish_rows_256(&a, op, sums, row, rows, column)
    BY_ACTIVATION(a.activation, ALL)
#undef ALL
}
