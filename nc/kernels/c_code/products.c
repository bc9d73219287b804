/* Linears, convolutions with windows of one position, and depthwise convolutions in int8, for CPUs with AVX2 that have neither VNNI nor
 * AVX-512. Their vpmaddubsw adds pairs of products in 16 bits. nc.graph.saturation sees to it that no pair of neighbouring input channels
 * leaves these, so sums are exact.
 *
 * Each function has the form of dnnl_primitive_execute: (numbers, not used, count of tensors, addresses). They begin with
 *
 * numbers: threads, outputs, what is added (ADDED), what is written (CODES, FP32 or INT8), an operation; bits of floats: two numbers of the
 *   operation, scale and zero point of what is added, 1 / scale of the result, its zero point
 * tensors: result [rows, outputs], codes, weights, -zero_point * sum of weights (int32), scale, bias (both fp32, all three by outputs)
 *
 * result = operation(scale * sum + bias + what is added), which is then quantized where codes are written.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "openmp.h"

#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) AVX2

/* A tile of ROWS rows and VECTORS x WIDTH outputs: its sums, one vector of codes and one of ones fit 16 registers. */
enum { ROWS = 5, VECTORS = 2, WIDTH = 8, PANEL = VECTORS * WIDTH };
/* Rows whose sums are finished at once; bytes of rows that are multiplied with one panel after the other: they stay in the L2 cache. */
enum { BLOCK = 60, CHUNK = 128 * 1024 };
enum { THREADS, OUTPUTS, ADDED, WRITTEN, OPERATION, NUMBERS, SHAPES = NUMBERS + 6 };
/* Of a product. */
enum { INPUTS = SHAPES, STRIDE, COUNT };
/* Of a depthwise convolution. */
enum { IMAGES = SHAPES, IN_H, IN_W, OUT_H, OUT_W, WINDOW_H, WINDOW_W, STEP_H, STEP_W, DILATION_H, DILATION_W, PAD_H, PAD_W };
enum { NOTHING_ADDED, CODES_IN_PLACE, FP32_IN_PLACE, FP32_OTHER };
enum { CODES, FP32, INT8 }; /* INT8: the zero point is 128 more than that of the codes, which are made as uint8 */
enum { IDENTITY, RELU, LEAKY_RELU, CLIP, HARDSWISH, SWISH, GELU_TANH, GELU_ERF };
_Static_assert(BLOCK % ROWS == 0, "tiles are whole, but for the last rows");

struct job {
    const int64_t *how;
    char *y;
    const uint8_t *x;
    const int8_t *weights;
    const int32_t *init;
    const float *scale, *bias;
    const void *more; /* what is added in fp32, or a pixel of zero points */
    float alpha, beta, added_scale, added_zero_point, inverse, zero_point;
    int64_t by_panels; /* threads share panels, else rows */
};

/* What both kinds have in common. */
static int check(const int64_t *how)
{
    EXPECT(how[THREADS] > 0 && how[OUTPUTS] > 0, OTHER_SIZE);
    EXPECT(how[ADDED] >= NOTHING_ADDED && how[ADDED] <= FP32_OTHER && how[WRITTEN] >= CODES && how[WRITTEN] <= INT8, OTHER_OPERATION);
    EXPECT(how[OPERATION] >= IDENTITY && how[OPERATION] <= GELU_ERF, OTHER_OPERATION);
    return OK;
}

static struct job job_of(const int64_t *how, int count, char *const *tensors)
{
    struct job job = {.how = how, .y = tensors[0], .x = (const uint8_t *)tensors[1], .weights = (const int8_t *)tensors[2],
                      .init = (const int32_t *)tensors[3], .scale = (const float *)tensors[4], .bias = (const float *)tensors[5],
                      .more = count > 6 ? tensors[6] : 0};
    float *numbers[] = {&job.alpha, &job.beta, &job.added_scale, &job.added_zero_point, &job.inverse, &job.zero_point};
    for (int i = 0; i < 6; i++) {
        const uint32_t bits = (uint32_t)how[NUMBERS + i];
        memcpy(numbers[i], &bits, 4);
    }
    return job;
}

/* e^x, for x that is limited to +-87: x = n ln 2 + r, and a polynomial for e^r (the coefficients of Cephes, S. Moshier). */
INLINE __m256 exponential(__m256 x)
{
    x = _mm256_max_ps(_mm256_min_ps(x, _mm256_set1_ps(87.0f)), _mm256_set1_ps(-87.0f));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x), p = _mm256_set1_ps(1.9875691500e-4f);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

/* x / (1 + e^-z) */
INLINE __m256 gated(__m256 x, __m256 z)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(x, _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), z))));
}

/* The error function within 1.5e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE __m256 error_function(__m256 x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f), size = _mm256_andnot_ps(sign, x);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.3275911f), one));
    __m256 p = _mm256_set1_ps(1.061405429f);
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-1.453152027f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(1.421413741f));
    p = _mm256_fmadd_ps(p, t, _mm256_set1_ps(-0.284496736f));
    p = _mm256_mul_ps(_mm256_fmadd_ps(p, t, _mm256_set1_ps(0.254829592f)), t);
    p = _mm256_fnmadd_ps(p, exponential(_mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(size, size))), one);
    return _mm256_or_ps(p, _mm256_and_ps(sign, x));
}

INLINE __m256 operation(const int64_t op, __m256 v, float alpha, float beta)
{
    const __m256 zero = _mm256_setzero_ps(), a = _mm256_set1_ps(alpha), b = _mm256_set1_ps(beta), one = _mm256_set1_ps(1.0f);
    switch (op) {
    case RELU: return _mm256_max_ps(v, zero);
    case LEAKY_RELU: return _mm256_blendv_ps(v, _mm256_mul_ps(v, a), _mm256_cmp_ps(v, zero, _CMP_LE_OS));
    case CLIP: return _mm256_min_ps(_mm256_max_ps(v, a), b);
    case HARDSWISH: return _mm256_mul_ps(v, _mm256_min_ps(_mm256_max_ps(_mm256_fmadd_ps(v, a, b), zero), one));
    case SWISH: return gated(v, _mm256_mul_ps(v, a));
    case GELU_TANH: {
        const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(0.044715f), _mm256_mul_ps(v, v)), v, v);
        return gated(v, _mm256_mul_ps(_mm256_set1_ps(1.5957691216057308f), cubic));
    }
    case GELU_ERF: {
        const __m256 half = _mm256_mul_ps(_mm256_set1_ps(0.5f), v);
        return _mm256_fmadd_ps(half, error_function(_mm256_mul_ps(v, _mm256_set1_ps(0.70710678118654752f))), half);
    }
    default: return v;
    }
}

/* 8 codes from `from` on, or `n` where there are fewer. */
INLINE __m128i some_codes(const uint8_t *from, int64_t n)
{
    int64_t codes = 0;
    if (n >= 8)
        memcpy(&codes, from, 8);
    else
        memcpy(&codes, from, (size_t)n);
    return _mm_cvtsi64_si128(codes);
}

INLINE __m256 some_fp32(const float *from, int64_t n)
{
    float part[8] = {0};
    if (n >= 8)
        return _mm256_loadu_ps(from);
    memcpy(part, from, (size_t)n * sizeof *from);
    return _mm256_loadu_ps(part);
}

/* What a result is made of, in registers: the compiler must take a result in 8 bits to change the job. */
struct after {
    __m256 added_scale, added_zero_point, inverse, zero_point;
    float alpha, beta;
    const float *other;
    char *y;
    int64_t added, written, sign; /* sign: the bits in which 8 codes differ from uint8 */
};

/* 8 sums → 8 results in fp32, before they are quantized. */
INLINE __m256 result_of(const struct after *a, const int64_t op, const int32_t *sums, __m256 scale, __m256 bias, int64_t at, int64_t n)
{
    __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)sums)), scale, bias);
    if (a->added == CODES_IN_PLACE) {
        const __m256 old = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some_codes((const uint8_t *)a->y + at, n)));
        v = _mm256_fmadd_ps(_mm256_sub_ps(old, a->added_zero_point), a->added_scale, v);
    } else if (a->added != NOTHING_ADDED) {
        v = _mm256_fmadd_ps(some_fp32((a->added == FP32_OTHER ? a->other : (const float *)a->y) + at, n), a->added_scale, v);
    }
    return operation(op, v, a->alpha, a->beta);
}

/* The codes of 8 results as integers that packing saturates at 0; what is no number becomes 0. */
INLINE __m256i codes_of(const struct after *a, __m256 v)
{
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_set1_ps(255.0f), _mm256_fmadd_ps(v, a->inverse, a->zero_point)));
}

/* Sums → results, from output `column` on: `n` of them. */
INLINE void finish_rows(const struct job *job, const int64_t op, int32_t (*sums)[PANEL], int64_t rows, int64_t row, int64_t column, int64_t n)
{
    const struct after a = {_mm256_set1_ps(job->added_scale), _mm256_set1_ps(job->added_zero_point), _mm256_set1_ps(job->inverse),
                            _mm256_set1_ps(job->zero_point), job->alpha, job->beta, (const float *)job->more, job->y, job->how[ADDED], job->how[WRITTEN],
                            job->how[WRITTEN] == INT8 ? (int64_t)0x8080808080808080 : 0};
    const int64_t outputs = job->how[OUTPUTS];
    const float *scales = job->scale + column, *biases = job->bias + column;
    if (n == PANEL && a.written != FP32) {
        const __m128i sign = _mm_set1_epi64x(a.sign);
        const __m256 scale = _mm256_loadu_ps(scales), bias = _mm256_loadu_ps(biases);
        const __m256 scale_2 = _mm256_loadu_ps(scales + WIDTH), bias_2 = _mm256_loadu_ps(biases + WIDTH);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
        for (int64_t r = 0, at = row * outputs + column; r < rows; r++, at += outputs) {
            const __m256i low = codes_of(&a, result_of(&a, op, sums[r], scale, bias, at, WIDTH));
            const __m256i high = codes_of(&a, result_of(&a, op, sums[r] + WIDTH, scale_2, bias_2, at + WIDTH, WIDTH));
            const __m256i words = _mm256_packs_epi32(low, high);
            const __m256i codes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order);
            _mm_storeu_si128((__m128i *)(a.y + at), _mm_xor_si128(_mm256_castsi256_si128(codes), sign));
        }
        return;
    }
    for (int64_t done = 0; done < n; done += WIDTH) {
        const __m256 scale = _mm256_loadu_ps(scales + done), bias = _mm256_loadu_ps(biases + done);
        const int64_t left = n - done < WIDTH ? n - done : WIDTH;
        for (int64_t r = 0, at = row * outputs + column + done; r < rows; r++, at += outputs) {
            const __m256 v = result_of(&a, op, sums[r] + done, scale, bias, at, left);
            if (a.written == FP32) {
                float part[WIDTH], *to = (float *)a.y + at;
                _mm256_storeu_ps(left == WIDTH ? to : part, v);
                if (left < WIDTH)
                    memcpy(to, part, (size_t)left * sizeof *to);
                continue;
            }
            const __m256i wide = codes_of(&a, v);
            const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const int64_t codes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words)) ^ a.sign;
            if (left == WIDTH)
                memcpy(a.y + at, &codes, WIDTH);
            else
                memcpy(a.y + at, &codes, (size_t)left);
        }
    }
}

/* The same, with one loop for each operation. */
AVX2 static void finish(const struct job *job, int32_t (*sums)[PANEL], int64_t rows, int64_t row, int64_t column, int64_t n)
{
    switch (job->how[OPERATION]) {
    case IDENTITY: finish_rows(job, IDENTITY, sums, rows, row, column, n); break;
    case RELU: finish_rows(job, RELU, sums, rows, row, column, n); break;
    case LEAKY_RELU: finish_rows(job, LEAKY_RELU, sums, rows, row, column, n); break;
    case CLIP: finish_rows(job, CLIP, sums, rows, row, column, n); break;
    case HARDSWISH: finish_rows(job, HARDSWISH, sums, rows, row, column, n); break;
    case SWISH: finish_rows(job, SWISH, sums, rows, row, column, n); break;
    case GELU_TANH: finish_rows(job, GELU_TANH, sums, rows, row, column, n); break;
    case GELU_ERF: finish_rows(job, GELU_ERF, sums, rows, row, column, n); break;
    }
}

/* Sums of `rows` rows that are `stride` apart, with one panel: for each four inputs, four weights of each output. */
INLINE void multiply(const int rows, const int vectors, const uint8_t *x, int64_t stride, int64_t k, const int8_t *w, const int32_t *init,
                     int32_t (*sums)[PANEL])
{
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            acc[r][v] = _mm256_loadu_si256((const __m256i *)init + v);
    for (int64_t i = 0; i < k; i += 4, w += 32 * vectors)
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + r * stride + i, 4);
            const __m256i codes = _mm256_set1_epi32(four);
            for (int v = 0; v < vectors; v++) {
                const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_loadu_si256((const __m256i *)w + v));
                acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, ones));
            }
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            _mm256_storeu_si256((__m256i *)sums[r] + v, acc[r][v]);
}

#define TILE(rows) \
    case rows: multiply(rows, vectors, x, stride, k, w, init, sums); break

/* The same for up to BLOCK rows. */
INLINE void multiply_rows(int64_t rows, const int vectors, const uint8_t *x, int64_t stride, int64_t k, const int8_t *w, const int32_t *init,
                          int32_t (*sums)[PANEL])
{
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, sums += ROWS)
        multiply(ROWS, vectors, x, stride, k, w, init, sums);
    switch (rows) {
        TILE(4);
        TILE(3);
        TILE(2);
        TILE(1);
    }
}

/* Rows `first` to `last` with panels `from` to `to`. */
AVX2 static void multiply_some(const struct job *job, int64_t first, int64_t last, int64_t from, int64_t to)
{
    const int64_t *h = job->how, k = h[INPUTS], fit = CHUNK / k / ROWS * ROWS, chunk = fit < ROWS ? ROWS : fit;
    int32_t sums[BLOCK][PANEL];
    for (int64_t start = first; start < last; start += chunk) {
        const int64_t end = start + chunk < last ? start + chunk : last;
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t column = panel * PANEL, n = h[OUTPUTS] - column < PANEL ? h[OUTPUTS] - column : PANEL;
            const int8_t *weights = job->weights + column * k;
            for (int64_t row = start; row < end; row += BLOCK) {
                const int64_t count = end - row < BLOCK ? end - row : BLOCK;
                const uint8_t *x = job->x + row * h[STRIDE];
                if (n > WIDTH)
                    multiply_rows(count, 2, x, h[STRIDE], k, weights, job->init + column, sums);
                else
                    multiply_rows(count, 1, x, h[STRIDE], k, weights, job->init + column, sums);
                finish(job, sums, count, row, column, n);
            }
        }
    }
}

static int64_t panels_of(const int64_t *how) { return (how[OUTPUTS] + PANEL - 1) / PANEL; }

static void multiply_part(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const int64_t rows = job->how[COUNT], panels = panels_of(job->how);
    const int64_t tiles = (rows + ROWS - 1) / ROWS, last = tiles * (part + 1) / parts * ROWS;
    if (job->by_panels)
        multiply_some(job, 0, rows, panels * part / parts, panels * (part + 1) / parts);
    else
        multiply_some(job, tiles * part / parts * ROWS, last < rows ? last : rows, 0, panels);
}

/* Rows of codes, `stride` bytes from one to the next, times a weight.
 *
 * more numbers: inputs (a multiple of 4), stride, rows; weights: see nc_product_pack; more tensors: what is added in fp32, if it is not in place
 */
int nc_product(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(COUNT + 1, 6, 7);
    const int wrong = check(how);
    EXPECT(!wrong, wrong);
    EXPECT(how[ADDED] != FP32_OTHER || count == 7, OTHER_TENSORS);
    EXPECT(how[INPUTS] > 0 && how[INPUTS] % 4 == 0 && how[COUNT] >= 0, OTHER_SIZE);
    struct job job = job_of(how, count, tensors);
    const int64_t rows = how[COUNT], tiles = (rows + ROWS - 1) / ROWS, panels = panels_of(how);
    /* as much work as some thousand products is done before other threads wake up */
    const int64_t worth = 1 + rows * how[OUTPUTS] * how[INPUTS] / 65536, parts = how[THREADS] < worth ? how[THREADS] : worth;
    const int64_t of_rows = (tiles + parts - 1) / parts * panels, of_panels = (panels + parts - 1) / parts * tiles;
    (void)unused;
    job.by_panels = of_panels < of_rows || (of_panels == of_rows && how[OUTPUTS] > rows);
    in_parts(multiply_part, &job, parts, how[THREADS]);
    return 0;
}

struct packing {
    const int64_t *how;
    char *const *tensors;
};

/* Panels `from` to `to` of a weight. */
AVX2 static void pack_panels(const struct packing *job, int64_t from, int64_t to)
{
    const int64_t outputs = job->how[0], k = job->how[1];
    for (int64_t column = from * PANEL; column < to * PANEL && column < outputs; column += PANEL) {
        const int64_t left = outputs - column, width = left > WIDTH ? PANEL : WIDTH;
        char *panel = job->tensors[0] + column * k;
        if (left < width)
            memset(panel, 0, (size_t)(width * k));
        for (int64_t n = 0; n < width && n < left; n++) {
            const int8_t *codes = (const int8_t *)job->tensors[1] + (column + n) * k;
            int32_t sum = 0;
            for (int64_t i = 0; i < k; i++)
                sum += codes[i];
            for (int64_t i = 0; i < k; i += 4)
                memcpy(panel + i * width + n * 4, codes + i, 4);
            ((int32_t *)job->tensors[2])[column + n] = sum;
        }
    }
}

static void pack_part(void *data, int64_t part, int64_t parts)
{
    const struct packing *job = data;
    const int64_t panels = (job->how[0] + PANEL - 1) / PANEL;
    pack_panels(job, panels * part / parts, panels * (part + 1) / parts);
}

/* A weight in panels of 16 outputs, the last one of 8 if no more are needed: for each four inputs, four weights of each output.
 *
 * how: outputs, inputs (a multiple of 4), threads
 * tensors: packed [outputs rounded up to 8, inputs], codes [outputs, inputs], sums of each output
 */
int nc_product_pack(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(3, 3, 3);
    struct packing job = {how, tensors};
    (void)unused;
    EXPECT(how[0] > 0 && how[1] > 0 && how[1] % 4 == 0, OTHER_SIZE);
    in_parts(pack_part, &job, 1 + how[0] * how[1] / 65536, how[2]);
    return 0;
}

enum { PIXELS = 16, TAPS = 64 }; /* of the result that are computed with the weights of 16 channels; the most that a window may have */

/* An output position, and the corner of its window. */
struct position {
    int64_t image, row, column, top, left;
};

INLINE struct position position_of(const int64_t *h, int64_t index)
{
    const int64_t all = h[OUT_H] * h[OUT_W], image = index / all, row = (index - image * all) / h[OUT_W];
    const int64_t column = index - image * all - row * h[OUT_W];
    return (struct position){image, row, column, row * h[STEP_H] - h[PAD_H], column * h[STEP_W] - h[PAD_W]};
}

/* The next one: without a division. */
INLINE void advance(const int64_t *h, struct position *p)
{
    p->left += h[STEP_W];
    if (++p->column < h[OUT_W])
        return;
    p->column = 0;
    p->left = -h[PAD_W];
    p->top += h[STEP_H];
    if (++p->row < h[OUT_H])
        return;
    p->row = 0;
    p->top = -h[PAD_H];
    p->image++;
}

/* Whether the whole window lies in the image. */
INLINE int is_inside(const int64_t *h, const struct position *p)
{
    const int64_t bottom = p->top + (h[WINDOW_H] - 1) * h[DILATION_H], right = p->left + (h[WINDOW_W] - 1) * h[DILATION_W];
    return p->top >= 0 && p->left >= 0 && bottom < h[IN_H] && right < h[IN_W];
}

/* 16 channels of one pixel, whose taps lie at these distances from an address. Taps are taken in pairs, whose products are added in 32 bits,
 * so weights may have any codes. */
INLINE void depthwise_sums(uintptr_t from, const uintptr_t *taps, int64_t pairs, const int16_t *w, const int32_t *init, int32_t *sums)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)init), high = _mm256_loadu_si256((const __m256i *)init + 1);
    for (int64_t i = 0; i < pairs; i++, w += 32) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + taps[2 * i]));
        const __m128i b = _mm_loadu_si128((const __m128i *)(from + taps[2 * i + 1]));
        const __m256i first = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), second = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(first, _mm256_loadu_si256((const __m256i *)w)));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(second, _mm256_loadu_si256((const __m256i *)w + 1)));
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
}

/* Addresses of the taps of a window that leaves the image. */
static void border(const struct job *job, const struct position *p, uintptr_t *taps)
{
    const int64_t *h = job->how, count = h[WINDOW_H] * h[WINDOW_W];
    for (int64_t i = 0; i < count; i++) {
        const int64_t y = p->top + i / h[WINDOW_W] * h[DILATION_H], x = p->left + i % h[WINDOW_W] * h[DILATION_W];
        const int seen = y >= 0 && y < h[IN_H] && x >= 0 && x < h[IN_W];
        taps[i] = (uintptr_t)(seen ? job->x + ((p->image * h[IN_H] + y) * h[IN_W] + x) * h[OUTPUTS] : (const uint8_t *)job->more);
    }
    taps[count] = (uintptr_t)job->more; /* its weights are 0 */
}

/* Pixels `first` to `last` of the result. */
AVX2 static void depthwise(const struct job *job, int64_t first, int64_t last)
{
    const int64_t *h = job->how, channels = h[OUTPUTS], count = h[WINDOW_H] * h[WINDOW_W], pairs = (count + 1) / 2;
    uintptr_t from[PIXELS], inner[TAPS + 1] = {0}, outer[PIXELS][TAPS + 1];
    const uintptr_t *taps[PIXELS];
    int32_t sums[PIXELS][PANEL];
    for (int64_t i = 0; i < count; i++)
        inner[i] = (uintptr_t)((i / h[WINDOW_W] * h[DILATION_H] * h[IN_W] + i % h[WINDOW_W] * h[DILATION_W]) * channels);
    struct position position = position_of(h, first);
    for (int64_t start = first; start < last; start += PIXELS) {
        const int64_t n = last - start < PIXELS ? last - start : PIXELS;
        for (int64_t p = 0; p < n; p++, advance(h, &position)) {
            const int inside = is_inside(h, &position);
            const int64_t pixel = (position.image * h[IN_H] + position.top) * h[IN_W] + position.left;
            from[p] = inside ? (uintptr_t)(job->x + pixel * channels) : 0;
            taps[p] = inside ? inner : outer[p];
            if (!inside)
                border(job, &position, outer[p]);
        }
        for (int64_t block = 0; block < channels; block += PANEL) {
            const int64_t channel = block + PANEL <= channels ? block : channels - PANEL; /* the last 16, perhaps some again */
            const int16_t *weights = (const int16_t *)job->weights + block * pairs * 2;
            for (int64_t p = 0; p < n; p++)
                depthwise_sums(from[p] + (uintptr_t)channel, taps[p], pairs, weights, job->init + channel, sums[p]);
            finish(job, sums, n, start, channel, PANEL);
        }
    }
}

static void convolve(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const int64_t pixels = job->how[IMAGES] * job->how[OUT_H] * job->how[OUT_W];
    depthwise(job, pixels * part / parts, pixels * (part + 1) / parts);
}

/* A convolution of images with channels last, each channel for itself. There are 16 channels at least; where they are no multiple of 16,
 * nothing may be added in place, because some are computed twice. Nothing else is added in fp32.
 *
 * more numbers: images; height and width of an image, of its result, of the window (TAPS at most), of steps, dilations and pads before
 * weights: [channels / 16 rounded up, pairs of taps, 16, 2] in 16 bits; more tensors: a pixel of zero points
 */
int nc_product_depthwise(const int64_t *how, void *unused, int count, char *const *tensors)
{
    TAKES(PAD_W + 1, 7, 7);
    const int wrong = check(how);
    EXPECT(!wrong, wrong);
    EXPECT(how[ADDED] != FP32_OTHER, OTHER_OPERATION);
    EXPECT(how[OUTPUTS] >= PANEL && (how[ADDED] == NOTHING_ADDED || how[OUTPUTS] % PANEL == 0), OTHER_SIZE);
    EXPECT(how[WINDOW_H] > 0 && how[WINDOW_W] > 0 && how[WINDOW_H] <= TAPS && how[WINDOW_H] * how[WINDOW_W] <= TAPS, OTHER_SIZE);
    EXPECT(how[IMAGES] >= 0 && how[IN_H] > 0 && how[IN_W] > 0 && how[OUT_H] > 0 && how[OUT_W] > 0, OTHER_SIZE);
    struct job job = job_of(how, count, tensors);
    const int64_t pixels = how[IMAGES] * how[OUT_H] * how[OUT_W], work = pixels * how[OUTPUTS] * how[WINDOW_H] * how[WINDOW_W];
    (void)unused;
    in_parts(convolve, &job, 1 + work / 32768, how[THREADS]);
    return 0;
}

int64_t nc_isas(void) { return 1 << ISA_AVX2; }
