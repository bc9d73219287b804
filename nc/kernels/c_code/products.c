/* Linears, convolutions with windows of one position, and depthwise convolutions in int8, for CPUs with AVX2
 * that have neither VNNI nor AVX-512. Their vpmaddubsw adds pairs of products in 16 bits. nc.graph.saturation
 * sees to it that no pair of neighbouring input channels leaves these, so sums are exact.
 *
 * Tensors begin with: result [rows, outputs], codes, weights, -zero_point * sum of weights (int32), scale,
 * bias (both fp32, all three by outputs).
 *
 * result = activation(scale * sum + bias + what is added), which is then quantized where codes are written.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "caches.h"
#include "calls.h"
#include "openmp.h"

#define FOR_AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline)) FOR_AVX2
static const float of_erf[][GELU_PIECES] = GELU_TAIL_ERF, of_tanh[][GELU_PIECES] = GELU_TAIL_TANH;
#include "activation_256.h"

/* A tile of ROWS rows and VECTORS x WIDTH outputs: its sums, one vector of codes and one of ones fit 16
 * registers. */
enum { ROWS = 5, VECTORS = 2, WIDTH = HALF_PANEL };
/* Rows whose sums are finished at once. */
enum { BLOCK = 60 };
_Static_assert(VECTORS * WIDTH == PANEL, "a panel is one tile wide");
_Static_assert(BLOCK % ROWS == 0, "tiles are whole, but for the last rows");

struct job {
    int64_t outputs, added, to, activation;
    char *y;
    const uint8_t *x;
    const int8_t *weights;
    const int32_t *init;
    const float *scale, *bias;
    const void *more; /* what is added in fp32, or a pixel of zero points */
    float alpha, beta, added_scale, added_zero_point, inverse, zero_point;
    const struct nc_product *product;     /* one of them, the other one is null */
    const struct nc_depthwise *depthwise;
    int64_t by_panels; /* threads share panels, else rows */
};

/* What both kinds have in common. */
#define JOB_OF(how, count, tensors)                                                                       \
    {.outputs = (how)->outputs, .added = (how)->added, .to = (how)->to, .activation = (how)->activation, \
     .y = (tensors)[0], .x = (const uint8_t *)(tensors)[1], .weights = (const int8_t *)(tensors)[2],     \
     .init = (const int32_t *)(tensors)[3], .scale = (const float *)(tensors)[4],                        \
     .bias = (const float *)(tensors)[5], .more = (count) > 6 ? (tensors)[6] : 0,                        \
     .alpha = (float)(how)->alpha, .beta = (float)(how)->beta,                                           \
     .added_scale = (float)(how)->added_scale, .added_zero_point = (float)(how)->added_zero_point,       \
     .inverse = (float)(how)->inverse, .zero_point = (float)(how)->zero_point}

static int check(const struct job *job, int64_t threads)
{
    EXPECT(threads > 0 && job->outputs > 0, OTHER_SIZE);
    EXPECT(job->to == DTYPE_U8 || job->to == DTYPE_S8 || job->to == DTYPE_F32, OTHER_DTYPE);
    EXPECT(job->added >= ADDED_NOTHING && job->added <= ADDED_FP32_OTHER, OTHER_OPERATION);
    EXPECT(job->activation >= ACTIVATION_IDENTITY && job->activation <= ACTIVATION_GELU_ERF, OTHER_OPERATION);
    return OK;
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
    int64_t added, to, sign; /* sign: the bits in which 8 codes differ from uint8 */
};

/* 8 sums → 8 results in fp32, before they are quantized. */
INLINE __m256 result_of(const struct after *a, const int64_t op, const int32_t *sums, __m256 scale,
    __m256 bias, int64_t at, int64_t n)
{
    __m256 v = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)sums)), scale, bias);
    if (a->added == ADDED_CODES_IN_PLACE) {
        const __m256 old =
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(some_codes((const uint8_t *)a->y + at, n)));
        v = _mm256_fmadd_ps(_mm256_sub_ps(old, a->added_zero_point), a->added_scale, v);
    } else if (a->added != ADDED_NOTHING) {
        v = _mm256_fmadd_ps(
            some_fp32((a->added == ADDED_FP32_OTHER ? a->other : (const float *)a->y) + at, n),
            a->added_scale, v);
    }
    return activation_of_8(op, v, a->alpha, a->beta);
}

/* The codes of 8 results as integers that packing saturates at 0; what is no number becomes 0. */
INLINE __m256i codes_of(const struct after *a, __m256 v)
{
    return _mm256_cvtps_epi32(
        _mm256_min_ps(_mm256_set1_ps(255.0f), _mm256_fmadd_ps(v, a->inverse, a->zero_point)));
}

/* Sums → results, from output `column` on: `n` of them. */
INLINE void finish_rows(const struct job *job, const int64_t op, int32_t (*sums)[PANEL], int64_t rows,
    int64_t row, int64_t column, int64_t n)
{
    const struct after a = {_mm256_set1_ps(job->added_scale), _mm256_set1_ps(job->added_zero_point),
        _mm256_set1_ps(job->inverse), _mm256_set1_ps(job->zero_point), job->alpha, job->beta,
        (const float *)job->more, job->y, job->added, job->to,
        job->to == DTYPE_S8 ? (int64_t)0x8080808080808080 : 0};
    const int64_t outputs = job->outputs;
    const float *scales = job->scale + column, *biases = job->bias + column;
    if (n == PANEL && a.to != DTYPE_F32) {
        const __m128i sign = _mm_set1_epi64x(a.sign);
        const __m256 scale = _mm256_loadu_ps(scales), bias = _mm256_loadu_ps(biases);
        const __m256 scale_2 = _mm256_loadu_ps(scales + WIDTH), bias_2 = _mm256_loadu_ps(biases + WIDTH);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
        for (int64_t r = 0, at = row * outputs + column; r < rows; r++, at += outputs) {
            const __m256i low = codes_of(&a, result_of(&a, op, sums[r], scale, bias, at, WIDTH));
            const __m256i high =
                codes_of(&a, result_of(&a, op, sums[r] + WIDTH, scale_2, bias_2, at + WIDTH, WIDTH));
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
            if (a.to == DTYPE_F32) {
                float part[WIDTH], *to = (float *)a.y + at;
                _mm256_storeu_ps(left == WIDTH ? to : part, v);
                if (left < WIDTH)
                    memcpy(to, part, (size_t)left * sizeof *to);
                continue;
            }
            const __m256i wide = codes_of(&a, v);
            const __m128i words =
                _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
            const int64_t codes = _mm_cvtsi128_si64(_mm_packus_epi16(words, words)) ^ a.sign;
            if (left == WIDTH)
                memcpy(a.y + at, &codes, WIDTH);
            else
                memcpy(a.y + at, &codes, (size_t)left);
        }
    }
}

/* The same, with one loop for each operation. */
FOR_AVX2 static void finish(const struct job *job, int32_t (*sums)[PANEL], int64_t rows, int64_t row,
    int64_t column, int64_t n)
{
    switch (job->activation) {
    case ACTIVATION_IDENTITY: finish_rows(job, ACTIVATION_IDENTITY, sums, rows, row, column, n); break;
    case ACTIVATION_RELU: finish_rows(job, ACTIVATION_RELU, sums, rows, row, column, n); break;
    case ACTIVATION_LEAKY_RELU: finish_rows(job, ACTIVATION_LEAKY_RELU, sums, rows, row, column, n); break;
    case ACTIVATION_CLIP: finish_rows(job, ACTIVATION_CLIP, sums, rows, row, column, n); break;
    case ACTIVATION_HARDSWISH: finish_rows(job, ACTIVATION_HARDSWISH, sums, rows, row, column, n); break;
    case ACTIVATION_SWISH: finish_rows(job, ACTIVATION_SWISH, sums, rows, row, column, n); break;
    case ACTIVATION_GELU_TANH: finish_rows(job, ACTIVATION_GELU_TANH, sums, rows, row, column, n); break;
    case ACTIVATION_GELU_ERF: finish_rows(job, ACTIVATION_GELU_ERF, sums, rows, row, column, n); break;
    }
}

/* Sums of `rows` rows that are `stride` apart, with one panel: for each four inputs, four weights of each
 * output. */
INLINE void multiply(const int rows, const int vectors, const uint8_t *x, int64_t stride, int64_t k,
    const int8_t *w, const int32_t *init, int32_t (*sums)[PANEL])
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
INLINE void multiply_rows(int64_t rows, const int vectors, const uint8_t *x, int64_t stride, int64_t k,
    const int8_t *w, const int32_t *init, int32_t (*sums)[PANEL])
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
FOR_AVX2 static void multiply_some(const struct job *job, int64_t first, int64_t last, int64_t from,
    int64_t to)
{
    const int64_t k = job->product->inputs, stride = job->product->stride, outputs = job->outputs;
    /* rows that are multiplied with one panel after the other stay in the second cache */
    const int64_t fit = second_cache() / 4 / k / ROWS * ROWS, chunk = fit < ROWS ? ROWS : fit;
    int32_t sums[BLOCK][PANEL];
    for (int64_t start = first; start < last; start += chunk) {
        const int64_t end = start + chunk < last ? start + chunk : last;
        for (int64_t panel = from; panel < to; panel++) {
            const int64_t column = panel * PANEL, n = outputs - column < PANEL ? outputs - column : PANEL;
            const int8_t *weights = job->weights + column * k;
            for (int64_t row = start; row < end; row += BLOCK) {
                const int64_t count = end - row < BLOCK ? end - row : BLOCK;
                const uint8_t *x = job->x + row * stride;
                if (n > WIDTH)
                    multiply_rows(count, 2, x, stride, k, weights, job->init + column, sums);
                else
                    multiply_rows(count, 1, x, stride, k, weights, job->init + column, sums);
                finish(job, sums, count, row, column, n);
            }
        }
    }
}

static int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

static void multiply_part(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const int64_t rows = job->product->rows, panels = panels_of(job->outputs);
    const int64_t tiles = (rows + ROWS - 1) / ROWS, last = tiles * (part + 1) / parts * ROWS;
    if (job->by_panels)
        multiply_some(job, 0, rows, panels * part / parts, panels * (part + 1) / parts);
    else
        multiply_some(job, tiles * part / parts * ROWS, last < rows ? last : rows, 0, panels);
}

/* weights: see nc_pack; more tensors: what is added in fp32, if it is not in place */
int nc_product(const struct nc_product *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_product);
    struct job job = JOB_OF(how, count, tensors);
    const int wrong = check(&job, how->threads);
    EXPECT(!wrong, wrong);
    EXPECT(how->added != ADDED_FP32_OTHER || count == 7, OTHER_TENSORS);
    EXPECT(how->inputs > 0 && how->inputs % 4 == 0 && how->rows >= 0, OTHER_SIZE);
    const int64_t rows = how->rows, tiles = (rows + ROWS - 1) / ROWS, panels = panels_of(how->outputs);
    /* as much work as some thousand products is done before other threads wake up */
    const int64_t worth = 1 + rows * how->outputs * how->inputs / 65536,
        parts = how->threads < worth ? how->threads : worth;
    const int64_t of_rows = (tiles + parts - 1) / parts * panels,
        of_panels = (panels + parts - 1) / parts * tiles;
    job.product = how;
    job.by_panels = of_panels < of_rows || (of_panels == of_rows && how->outputs > rows);
    in_parts(multiply_part, &job, parts, how->threads);
    return OK;
}

struct packing {
    const struct nc_pack *how;
    char *const *tensors;
};

/* Panels `from` to `to` of a weight. */
FOR_AVX2 static void pack_panels(const struct packing *job, int64_t from, int64_t to)
{
    const int64_t outputs = job->how->outputs, k = job->how->inputs;
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
    const int64_t panels = panels_of(job->how->outputs);
    pack_panels(job, panels * part / parts, panels * (part + 1) / parts);
}

/* Panels of 16 outputs, the last one of 8 if no more are needed: for each four inputs, four weights of each
 * output.
 *
 * tensors: packed [outputs rounded up to 8, inputs], codes [outputs, inputs], sums of each output
 */
int nc_pack(const struct nc_pack *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_pack);
    struct packing job = {how, tensors};
    EXPECT(how->outputs > 0 && how->inputs > 0 && how->inputs % 4 == 0, OTHER_SIZE);
    in_parts(pack_part, &job, 1 + how->outputs * how->inputs / 65536, how->threads);
    return OK;
}

enum { PIXELS = 16 }; /* of the result that are computed with the weights of 16 channels */

/* An output position, and the corner of its window. */
struct position {
    int64_t image, row, column, top, left;
};

INLINE struct position position_of(const struct nc_depthwise *h, int64_t index)
{
    const int64_t all = h->result[0] * h->result[1], image = index / all,
        row = (index - image * all) / h->result[1];
    const int64_t column = index - image * all - row * h->result[1];
    return (struct position){image, row, column, row * h->steps[0] - h->pads[0],
        column * h->steps[1] - h->pads[1]};
}

/* The next one: without a division. */
INLINE void advance(const struct nc_depthwise *h, struct position *p)
{
    p->left += h->steps[1];
    if (++p->column < h->result[1])
        return;
    p->column = 0;
    p->left = -h->pads[1];
    p->top += h->steps[0];
    if (++p->row < h->result[0])
        return;
    p->row = 0;
    p->top = -h->pads[0];
    p->image++;
}

/* Whether the whole window lies in the image. */
INLINE int is_inside(const struct nc_depthwise *h, const struct position *p)
{
    const int64_t bottom = p->top + (h->window[0] - 1) * h->dilations[0],
        right = p->left + (h->window[1] - 1) * h->dilations[1];
    return p->top >= 0 && p->left >= 0 && bottom < h->image[0] && right < h->image[1];
}

/* 16 channels of one pixel, whose taps lie at these distances from an address. Taps are taken in pairs, whose
 * products are added in 32 bits, so weights may have any codes. */
INLINE void depthwise_sums(uintptr_t from, const uintptr_t *taps, int64_t pairs, const int16_t *w,
    const int32_t *init, int32_t *sums)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)init),
        high = _mm256_loadu_si256((const __m256i *)init + 1);
    for (int64_t i = 0; i < pairs; i++, w += 32) {
        const __m128i a = _mm_loadu_si128((const __m128i *)(from + taps[2 * i]));
        const __m128i b = _mm_loadu_si128((const __m128i *)(from + taps[2 * i + 1]));
        const __m256i first = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)),
            second = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(first, _mm256_loadu_si256((const __m256i *)w)));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(second, _mm256_loadu_si256((const __m256i *)w + 1)));
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
}

/* Addresses of the taps of a window that leaves the image. */
static void border(const struct job *job, const struct position *p, uintptr_t *taps)
{
    const struct nc_depthwise *h = job->depthwise;
    const int64_t count = h->window[0] * h->window[1];
    for (int64_t i = 0; i < count; i++) {
        const int64_t y = p->top + i / h->window[1] * h->dilations[0],
            x = p->left + i % h->window[1] * h->dilations[1];
        const int seen = y >= 0 && y < h->image[0] && x >= 0 && x < h->image[1];
        const int64_t pixel = (p->image * h->image[0] + y) * h->image[1] + x;
        taps[i] = (uintptr_t)(seen ? job->x + pixel * h->outputs : (const uint8_t *)job->more);
    }
    taps[count] = (uintptr_t)job->more; /* its weights are 0 */
}

/* Pixels `first` to `last` of the result. */
FOR_AVX2 static void depthwise(const struct job *job, int64_t first, int64_t last)
{
    const struct nc_depthwise *h = job->depthwise;
    const int64_t channels = h->outputs, count = h->window[0] * h->window[1], pairs = (count + 1) / 2;
    uintptr_t from[PIXELS], inner[MOST_TAPS + 1] = {0}, outer[PIXELS][MOST_TAPS + 1];
    const uintptr_t *taps[PIXELS];
    int32_t sums[PIXELS][PANEL];
    for (int64_t i = 0; i < count; i++)
        inner[i] = (uintptr_t)((i / h->window[1] * h->dilations[0] * h->image[1]
            + i % h->window[1] * h->dilations[1]) * channels);
    struct position position = position_of(h, first);
    for (int64_t start = first; start < last; start += PIXELS) {
        const int64_t n = last - start < PIXELS ? last - start : PIXELS;
        for (int64_t p = 0; p < n; p++, advance(h, &position)) {
            const int inside = is_inside(h, &position);
            const int64_t pixel = (position.image * h->image[0] + position.top) * h->image[1] + position.left;
            from[p] = inside ? (uintptr_t)(job->x + pixel * channels) : 0;
            taps[p] = inside ? inner : outer[p];
            if (!inside)
                border(job, &position, outer[p]);
        }
        for (int64_t block = 0; block < channels; block += PANEL) {
            /* the last 16, perhaps some again */
            const int64_t channel = block + PANEL <= channels ? block : channels - PANEL;
            const int16_t *weights = (const int16_t *)job->weights + block * pairs * 2;
            for (int64_t p = 0; p < n; p++)
                depthwise_sums(from[p] + (uintptr_t)channel, taps[p], pairs, weights, job->init + channel,
                    sums[p]);
            finish(job, sums, n, start, channel, PANEL);
        }
    }
}

static void convolve(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const int64_t *size = job->depthwise->result, pixels = job->depthwise->images * size[0] * size[1];
    depthwise(job, pixels * part / parts, pixels * (part + 1) / parts);
}

/* There are 16 channels at least; where they are no multiple of 16, nothing may be added in place, because
 * some are computed twice. Nothing else is added in fp32.
 *
 * weights: [channels / 16 rounded up, pairs of taps, 16, 2] in 16 bits; more tensors: a pixel of zero points
 */
int nc_depthwise(const struct nc_depthwise *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_depthwise);
    struct job job = JOB_OF(how, count, tensors);
    const int64_t height = how->window[0], width = how->window[1];
    const int wrong = check(&job, how->threads);
    EXPECT(!wrong, wrong);
    EXPECT(how->added != ADDED_FP32_OTHER, OTHER_OPERATION);
    EXPECT(how->outputs >= PANEL && (how->added == ADDED_NOTHING || how->outputs % PANEL == 0), OTHER_SIZE);
    EXPECT(height > 0 && width > 0 && height <= MOST_TAPS && height * width <= MOST_TAPS, OTHER_SIZE);
    EXPECT(how->images >= 0 && how->image[0] > 0 && how->image[1] > 0 && how->result[0] > 0
        && how->result[1] > 0, OTHER_SIZE);
    const int64_t pixels = how->images * how->result[0] * how->result[1],
        work = pixels * how->outputs * height * width;
    job.depthwise = how;
    in_parts(convolve, &job, 1 + work / 32768, how->threads);
    return OK;
}

int64_t nc_isas(void) { return 1 << ISA_AVX2; }
