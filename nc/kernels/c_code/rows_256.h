/* What rows.c does with codes, for CPUs without AVX512-VNNI: the same codes, the same exact sums and the same
 * layouts, in registers of 256 bits. A word of weights, 16 outputs with 4 inputs each, is two of them.
 *
 * AVX-VNNI has vpdpbusd. AVX2 has vpmaddubsw, which adds pairs of products in 16 bits and saturates: callers
 * give it weights whose pairs fit (nc.numerics.int16_pairs), with which no code from 0 to 255 gets there.
 */
#include "finish_256.h"

/* ---- rounding ---- */

AVX2_INLINE float largest_of_8(__m256 x)
{
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}

FOR_AVX2 static struct range measured_256(const struct rounding *r, const float *x)
{
    const __m256 zero = _mm256_setzero_ps();
    __m256 low = zero, high = zero, no_numbers = zero;
    for (int64_t k = 0; k < r->inputs; k += WIDTH) {
        const __m256 v = some_8(x + k, r->inputs - k);
        no_numbers = _mm256_or_ps(no_numbers, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        low = _mm256_min_ps(low, v);
        high = _mm256_max_ps(high, v);
    }
    const float least = -largest_of_8(_mm256_sub_ps(zero, low));
    return range_of(least, largest_of_8(high), _mm256_movemask_ps(no_numbers));
}

FOR_AVX2 static void encode_256(const struct rounding *r, const float *x, int64_t row)
{
    const int64_t depth = whole(r->inputs, DEPTH);
    uint8_t *to = r->codes + row / TILE * TILE * depth + row % TILE * DEPTH;
    const float scale = r->scale[row];
    const __m256 by = _mm256_set1_ps(scale), inverse = _mm256_set1_ps(1 / scale),
                 middle = _mm256_set1_ps((float)r->zero_point[row]);
    for (int64_t k = 0; k < depth; k += WIDTH) {
        __m128i bytes = _mm_setzero_si128();
        if (k < r->inputs) {
            const __m256i codes = codes_of_8(some_8(x + k, r->inputs - k), by, inverse, middle);
            bytes = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
            bytes = _mm_packus_epi16(bytes, bytes);
        }
        _mm_storel_epi64((__m128i *)(to + k / DEPTH * TILE * DEPTH + k % DEPTH), bytes);
    }
}

/* ---- products ---- */

/* 8 sums of a row → results from output `column` on. */
AVX2_INLINE void finish_8(const struct job *j, const int64_t op, const int32_t *sums, int64_t row,
    int64_t column)
{
    const int64_t left = j->outputs - column, at = row * j->outputs + column;
    if (left <= 0)
        return;
    const __m256i zero_points = _mm256_mullo_epi32(_mm256_set1_epi32(j->zero_point[row]),
                      _mm256_loadu_si256((const __m256i *)(j->sums + column))),
                  sum = _mm256_sub_epi32(_mm256_loadu_si256((const __m256i *)sums), zero_points);
    __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(j->row_scale[row]));
    v = _mm256_fmadd_ps(v, _mm256_loadu_ps(j->scale + column), _mm256_loadu_ps(j->bias + column));
    v = activation_of_8(op, v, j->alpha, j->beta);
    if (j->added)
        v = _mm256_add_ps(v, some_8(j->added + at, left));
    if (left >= WIDTH)
        _mm256_storeu_ps((float *)j->y + at, v);
    else
        _mm256_maskstore_ps((float *)j->y + at, first_of_8(left), v);
}

/* Sums [rows][16] → results. */
FOR_AVX2 static void finish_panel(const struct job *j, int32_t (*sums)[TILE], int64_t row, int64_t rows,
    int64_t column)
{
    if (j->codes) {
        const struct after_256 after = AFTER_256(j->codes, j->y, j->scale, j->bias, j->added);
        finish_256(&after, sums, row, rows, column);
        return;
    }
#define ALL(op)                                                          \
    for (int64_t r = 0; r < rows; r++) {                                 \
        finish_8(j, op, sums[r], row + r, column);                       \
        finish_8(j, op, sums[r] + WIDTH, row + r, column + WIDTH);       \
    }
    BY_ACTIVATION(j->activation, ALL)
#undef ALL
}

/* sums + products of 32 codes four by four. */
AVX2_INLINE __m256i add_products_256(__m256i sums, __m256i x, __m256i w, const int vnni)
{
#if HAS_AVX_VNNI
    if (vnni) {
        VPDPBUSD_256(sums, x, w);
        return sums;
    }
#endif
    const __m256i pairs = _mm256_maddubs_epi16(x, w);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* Rows whose sums, with what the product needs besides, fit into 16 registers; and rows of a block. */
enum { ROWS_OF_VNNI = 6, ROWS_OF_PAIRS = 5, BLOCK_OF_256 = 64 };

/* Sums of R rows from `row` on and V times 8 outputs of a panel. */
AVX2_INLINE void multiply_rows_256(const struct job *j, int64_t row, const int8_t *weights,
    const int32_t *init, int32_t (*sums)[TILE], const int R, const int V, const int vnni)
{
    const uint8_t *x[ROWS_OF_VNNI];
    __m256i sum[ROWS_OF_VNNI][2];
    rows_of(&j->of, row, x, R);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++)
            sum[r][v] = init ? _mm256_loadu_si256((const __m256i *)init + v) : _mm256_setzero_si256();
    for (int64_t k = 0, begin = 0; k < j->of.used; k += DEPTH, begin += j->of.block) {
        const int64_t end = j->of.used - k < DEPTH ? j->of.used - k : DEPTH;
        for (int64_t at = 0; at < end; at += 4) {
            const __m256i *w = (const __m256i *)(weights + (k + at) * TILE);
            UNROLL for (int r = 0; r < R; r++)
            {
                int32_t four;
                memcpy(&four, x[r] + begin + at, 4);
                const __m256i codes = _mm256_set1_epi32(four);
                UNROLL for (int v = 0; v < V; v++)
                    sum[r][v] = add_products_256(sum[r][v], codes, _mm256_loadu_si256(w + v), vnni);
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++)
            _mm256_storeu_si256((__m256i *)sums[r] + v, sum[r][v]);
}

AVX2_INLINE void block_256(const struct job *j, int64_t row, int64_t rows, int64_t panel, const int most,
    const int V, const int vnni)
{
    const int8_t *weights = j->weights + panel * TILE * j->of.depth;
    const int32_t *init = j->codes ? j->sums + panel * TILE : NULL;
    int32_t sums[BLOCK_OF_256][TILE];
    int64_t done = 0;
    for (; done + most <= rows; done += most)
        multiply_rows_256(j, row + done, weights, init, sums + done, most, V, vnni);
    for (; done + 4 <= rows; done += 4)
        multiply_rows_256(j, row + done, weights, init, sums + done, 4, V, vnni);
    for (; done + 2 <= rows; done += 2)
        multiply_rows_256(j, row + done, weights, init, sums + done, 2, V, vnni);
    for (; done < rows; done++)
        multiply_rows_256(j, row + done, weights, init, sums + done, 1, V, vnni);
    finish_panel(j, sums, row, rows, panel * TILE);
}

FOR_AVX2 static void panel_256(const struct job *j, int64_t row, int64_t rows, int64_t panel)
{
    const int narrow = j->outputs - panel * TILE <= WIDTH;
    if (j->isa == ISA_AVX_VNNI)
        block_256(j, row, rows, panel, ROWS_OF_VNNI, 2, 1);
    else if (narrow)
        block_256(j, row, rows, panel, ROWS_OF_PAIRS, 1, 0);
    else
        block_256(j, row, rows, panel, ROWS_OF_PAIRS, 2, 0);
}

FOR_AVX2 static void pairs_of_rows_256(const struct job *j, int64_t first, int64_t last, int64_t from,
    int64_t to)
{
    const int64_t panels = whole(j->outputs, TILE) / TILE, end = 2 * to < panels ? 2 * to : panels;
    for (int64_t panel = 2 * from; panel < end; panel++)
        for (int64_t row = first; row < last; row += BLOCK_OF_256)
            panel_256(j, row, last - row < BLOCK_OF_256 ? last - row : BLOCK_OF_256, panel);
}
