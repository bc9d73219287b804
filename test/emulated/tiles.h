/* Tiles of AMX in plain C, for tests on CPUs that have none: in front of a source (`-include`), or as a part of
 * immintrin.h beside it. Where the CPU would raise a fault, and where a product would read what no load has
 * written, it says why and ends the process.
 */
#ifndef EMULATED_TILES_H
#define EMULATED_TILES_H
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILES static __attribute__((unused)) /* a source may use some of it */

enum { EMULATED_TILES = 8, EMULATED_ROWS = 16, EMULATED_BYTES = 64 };

struct emulated_tile {
    int rows, bytes, known; /* known: it was loaded, or set to zero, since it was configured */
    uint8_t data[EMULATED_ROWS][EMULATED_BYTES];
};

struct emulated_configuration {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[EMULATED_TILES], no_bytes[8];
    uint8_t rows[EMULATED_TILES], no_rows[8];
};

static __thread struct {
    int configured;
    struct emulated_tile tiles[EMULATED_TILES];
} emulated;

TILES void emulated_need(int condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "emulated tiles: %s\n", what);
    abort();
}

TILES struct emulated_tile *emulated_tile(int number)
{
    emulated_need(emulated.configured, "no configuration is loaded");
    emulated_need(number >= 0 && number < EMULATED_TILES, "there is no such tile");
    emulated_need(emulated.tiles[number].rows, "a tile that is used is not configured");
    return &emulated.tiles[number];
}

TILES struct emulated_tile *emulated_known(int number)
{
    struct emulated_tile *tile = emulated_tile(number);
    emulated_need(tile->known, "a tile is read that nothing was written to");
    return tile;
}

TILES void emulated_loadconfig(const void *from)
{
    struct emulated_configuration c;
    uint8_t reserved = 0;
    _Static_assert(sizeof c == 64, "as the CPU reads it");
    memcpy(&c, from, sizeof c);
    emulated_need(c.palette == 1 && !c.start, "another palette or first row");
    for (int i = 0; i < 14; i++)
        reserved |= c.reserved[i];
    for (int i = 0; i < 8; i++)
        reserved |= c.no_bytes[i] || c.no_rows[i];
    emulated_need(!reserved, "what is reserved is not zero");
    memset(&emulated, 0, sizeof emulated);
    for (int i = 0; i < EMULATED_TILES; i++) {
        emulated_need(c.rows[i] <= EMULATED_ROWS && c.bytes[i] <= EMULATED_BYTES && !c.rows[i] == !c.bytes[i],
            "a tile has no such size");
        emulated.tiles[i].rows = c.rows[i];
        emulated.tiles[i].bytes = c.bytes[i];
    }
    emulated.configured = 1;
}

TILES void emulated_release(void) { memset(&emulated, 0, sizeof emulated); }

TILES void emulated_zero(int to)
{
    struct emulated_tile *tile = emulated_tile(to);
    memset(tile->data, 0, sizeof tile->data);
    tile->known = 1;
}

/* Reads as many rows and bytes as are configured, and no more. */
TILES void emulated_loadd(int to, const void *base, int64_t stride)
{
    struct emulated_tile *tile = emulated_tile(to);
    emulated_zero(to);
    for (int r = 0; r < tile->rows; r++)
        memcpy(tile->data[r], (const char *)base + r * stride, (size_t)tile->bytes);
}

TILES void emulated_stored(int from, void *base, int64_t stride)
{
    const struct emulated_tile *tile = emulated_known(from);
    for (int r = 0; r < tile->rows; r++)
        memcpy((char *)base + r * stride, tile->data[r], (size_t)tile->bytes);
}

/* The tiles of a product: sums [M][N], x [M][K], w [K][N], where an element of x has four bytes. */
TILES struct emulated_tile *emulated_sums(int to, int x, int w)
{
    struct emulated_tile *sums = emulated_known(to);
    const struct emulated_tile *of_x = emulated_known(x), *of_w = emulated_known(w);
    emulated_need(to != x && to != w && x != w, "a product needs three tiles");
    emulated_need(sums->rows == of_x->rows && sums->bytes == of_w->bytes && of_x->bytes == 4 * of_w->rows,
        "sizes of a product do not fit");
    emulated_need(!(sums->bytes % 4) && !(of_x->bytes % 4), "a row is no whole number of elements");
    return sums;
}

/* Products of bytes, unsigned or signed ones of x with signed ones of w. */
TILES void emulated_dpb(int to, int x, int w, int is_signed)
{
    struct emulated_tile *sums = emulated_sums(to, x, w);
    const struct emulated_tile *of_x = emulated_known(x), *of_w = emulated_known(w);
    for (int m = 0; m < sums->rows; m++)
        for (int n = 0; n < sums->bytes / 4; n++) {
            uint32_t sum;
            memcpy(&sum, sums->data[m] + 4 * n, 4);
            for (int k = 0; k < of_x->bytes; k++) {
                const int byte = is_signed ? (int8_t)of_x->data[m][k] : of_x->data[m][k];
                sum += (uint32_t)(byte * (int8_t)of_w->data[k / 4][4 * n + k % 4]);
            }
            memcpy(sums->data[m] + 4 * n, &sum, 4);
        }
}

TILES float emulated_bf16(const uint8_t *from)
{
    float wide;
    const uint8_t bytes[] = {0, 0, from[0], from[1]};
    memcpy(&wide, bytes, 4);
    return wide;
}

/* 0 for what is below the smallest normal number: no product of bf16 takes or gives such numbers. */
TILES float emulated_normal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

__attribute__((target("fma"))) static float emulated_fma(float x, float w, float sum)
{
    return emulated_normal(__builtin_fmaf(emulated_normal(x), emulated_normal(w), sum));
}

/* In the order that the manual gives: sums of even and of odd products, both together, then the tile's. */
TILES void emulated_dpbf16ps(int to, int x, int w)
{
    struct emulated_tile *sums = emulated_sums(to, x, w);
    const struct emulated_tile *of_x = emulated_known(x), *of_w = emulated_known(w);
    for (int m = 0; m < sums->rows; m++)
        for (int n = 0; n < sums->bytes / 4; n++) {
            float sum, of[2] = {0};
            memcpy(&sum, sums->data[m] + 4 * n, 4);
            for (int k = 0; k < of_x->bytes; k += 2)
                of[k / 2 % 2] = emulated_fma(emulated_bf16(of_x->data[m] + k),
                    emulated_bf16(of_w->data[k / 4] + 4 * n + k % 4), of[k / 2 % 2]);
            sum = emulated_normal(emulated_normal(sum) + emulated_normal(of[0] + of[1]));
            memcpy(sums->data[m] + 4 * n, &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbusd(to, x, w) emulated_dpb(to, x, w, 0)
#define _tile_dpbssd(to, x, w) emulated_dpb(to, x, w, 1)
#define _tile_dpbf16ps emulated_dpbf16ps
#endif
