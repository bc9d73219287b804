/* Depthwise convolutions in int8, for CPUs with AVX2 that have neither VNNI nor AVX-512. Two taps of a channel
 * are multiplied and added in 32 bits, so sums are exact for all weights.
 *
 * Tensors: result, codes, weights, -zero_point * sum of weights (int32), scale, bias (both fp32, all three by
 * channels), a pixel of zero points. What becomes of sums: finish_256.h.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

#define FOR_AVX2 FOR_CPU("avx2,fma")
static const float of_erf[][GELU_PIECES] = GELU_TAIL_ERF, of_tanh[][GELU_PIECES] = GELU_TAIL_TANH;
#include "finish_256.h"

struct job {
    const struct nc_depthwise *how;
    char *y;
    const uint8_t *x, *beside; /* beside: a pixel of zero points */
    const int16_t *weights;
    const int32_t *init;
    const float *scale, *bias;
};

enum { PIXELS = 16 }; /* of the result that are computed with the weights of 16 channels */

/* An output position, and the corner of its window. */
struct position {
    int64_t image, row, column, top, left;
};

AVX2_INLINE struct position position_of(const struct nc_depthwise *h, int64_t index)
{
    const int64_t all = h->result[0] * h->result[1], image = index / all,
        row = (index - image * all) / h->result[1];
    const int64_t column = index - image * all - row * h->result[1];
    return (struct position){image, row, column, row * h->steps[0] - h->pads[0],
        column * h->steps[1] - h->pads[1]};
}

/* The next one: without a division. */
AVX2_INLINE void advance(const struct nc_depthwise *h, struct position *p)
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
AVX2_INLINE int is_inside(const struct nc_depthwise *h, const struct position *p)
{
    const int64_t bottom = p->top + (h->window[0] - 1) * h->dilations[0],
        right = p->left + (h->window[1] - 1) * h->dilations[1];
    return p->top >= 0 && p->left >= 0 && bottom < h->image[0] && right < h->image[1];
}

/* 16 channels of one pixel, whose taps lie at these distances from an address. Taps are taken in pairs, whose
 * products are added in 32 bits, so weights may have any codes. */
AVX2_INLINE void depthwise_sums(uintptr_t from, const uintptr_t *taps, int64_t pairs, const int16_t *w,
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
    const struct nc_depthwise *h = job->how;
    const int64_t count = h->window[0] * h->window[1];
    for (int64_t i = 0; i < count; i++) {
        const int64_t y = p->top + i / h->window[1] * h->dilations[0],
            x = p->left + i % h->window[1] * h->dilations[1];
        const int seen = y >= 0 && y < h->image[0] && x >= 0 && x < h->image[1];
        const int64_t pixel = (p->image * h->image[0] + y) * h->image[1] + x;
        taps[i] = (uintptr_t)(seen ? job->x + pixel * h->outputs : job->beside);
    }
    taps[count] = (uintptr_t)job->beside; /* its weights are 0 */
}

/* Pixels `first` to `last` of the result. */
FOR_AVX2 static void depthwise(const struct job *job, int64_t first, int64_t last)
{
    const struct nc_depthwise *h = job->how;
    const int64_t channels = h->outputs, count = h->window[0] * h->window[1], pairs = (count + 1) / 2;
    uintptr_t from[PIXELS], inner[MOST_TAPS + 1] = {0}, outer[PIXELS][MOST_TAPS + 1];
    const uintptr_t *taps[PIXELS];
    int32_t sums[PIXELS][PANEL];
    for (int64_t i = 0; i < count; i++)
        inner[i] = (uintptr_t)((i / h->window[1] * h->dilations[0] * h->image[1]
            + i % h->window[1] * h->dilations[1]) * channels);
    const struct after_256 after = AFTER_256(h, job->y, job->scale, job->bias, NULL);
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
            const int16_t *weights = job->weights + block * pairs * 2;
            for (int64_t p = 0; p < n; p++)
                depthwise_sums(from[p] + (uintptr_t)channel, taps[p], pairs, weights, job->init + channel,
                    sums[p]);
            finish_256(&after, sums, start, n, channel);
        }
    }
}

static void convolve(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const int64_t *size = job->how->result, pixels = job->how->images * size[0] * size[1];
    depthwise(job, pixels * part / parts, pixels * (part + 1) / parts);
}

/* There are 16 channels at least; where they are no multiple of 16, nothing may be added in place, because
 * some are computed twice. Nothing else is added in fp32.
 *
 * weights: [channels / 16 rounded up, pairs of taps, 16, 2] in 16 bits
 */
int nc_depthwise(const struct nc_depthwise *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_depthwise);
    const int64_t height = how->window[0], width = how->window[1];
    EXPECT(how->threads > 0, OTHER_SIZE);
    EXPECT(how->to == DTYPE_U8 || how->to == DTYPE_S8 || how->to == DTYPE_F32, OTHER_DTYPE);
    EXPECT(how->added >= ADDED_NOTHING && how->added < ADDED_FP32_OTHER, OTHER_OPERATION);
    EXPECT(how->activation >= ACTIVATION_IDENTITY && how->activation <= ACTIVATION_GELU_ERF, OTHER_OPERATION);
    EXPECT(how->outputs >= PANEL && (how->added == ADDED_NOTHING || how->outputs % PANEL == 0), OTHER_SIZE);
    EXPECT(height > 0 && width > 0 && height <= MOST_TAPS && height * width <= MOST_TAPS, OTHER_SIZE);
    EXPECT(how->images >= 0 && how->image[0] > 0 && how->image[1] > 0 && how->result[0] > 0
        && how->result[1] > 0, OTHER_SIZE);
    const int64_t pixels = how->images * how->result[0] * how->result[1],
        work = pixels * how->outputs * height * width;
    struct job job = {.how = how, .y = tensors[0], .x = (const uint8_t *)tensors[1],
        .beside = (const uint8_t *)tensors[6], .weights = (const int16_t *)tensors[2],
        .init = (const int32_t *)tensors[3], .scale = (const float *)tensors[4],
        .bias = (const float *)tensors[5]};
    in_parts(convolve, &job, 1 + work / 32768, how->threads);
    return OK;
}

CODE_FOR(1 << ISA_AVX2)
