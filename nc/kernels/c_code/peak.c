/* How many multiply-adds a core does in a second at best: products of registers alone, no memory.
 *
 * Without VNNI a product of bytes is three instructions. The caller asks the CPU whether it has them.
 */
#define _GNU_SOURCE
#include "isa.h"
#include "tiles.h"
#include <time.h>


CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX_VNNI | 1 << ISA_AVX512 | 1 << ISA_AVX512_VNNI | 1 << ISA_AVX512_BF16 | 1 << ISA_AMX)

enum { LOOPS = 300, TIMES = 4000 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Multiply-adds of one run of `body`, TIMES times in each loop, in a second of the fastest loop. */
#define BEST(products, body)                                  \
    double least = 1e9;                                       \
    for (int loop = 0; loop < LOOPS; loop++) {                \
        const double begin = seconds();                       \
        for (int i = 0; i < TIMES; i++)                       \
            body;                                             \
        const double taken = seconds() - begin;               \
        least = taken < least ? taken : least;                \
    }                                                         \
    const double rate = (double)(products) * TIMES / least;

#define CLOBBERS                                                                                          \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",     \
        "xmm12", "xmm13", "xmm14", "xmm15"
/* Twelve sums, so that no instruction waits for the one before. */
#define TWELVE(one) one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11)

/* Both factors: 1 as fp32, because numbers below the smallest normal one take some CPUs longer. Integers take
 * the same time whatever they are. */
#define ONES                                                                         \
    "vpcmpeqd %%xmm12, %%xmm12, %%xmm12\n vpslld $25, %%xmm12, %%xmm12\n"            \
    "vpsrld $2, %%xmm12, %%xmm12\n"
#define CLEAR(n) "vpxor %%xmm" #n ", %%xmm" #n ", %%xmm" #n "\n"

/* Pairs of products in 16 bits, and their sums. */
#define PAIRS_256(n)                                  \
    "vpmaddubsw %%ymm12, %%ymm12, %%ymm13\n"          \
    "vpmaddwd %%ymm12, %%ymm13, %%ymm13\n"            \
    "vpaddd %%ymm13, %%ymm" #n ", %%ymm" #n "\n"
#define VNNI_256(n) "%{vex%} vpdpbusd %%ymm12, %%ymm12, %%ymm" #n "\n"
#define VNNI_512(n) "vpdpbusd %%zmm12, %%zmm12, %%zmm" #n "\n"
#define BF16_512(n) "vdpbf16ps %%zmm12, %%zmm12, %%zmm" #n "\n"
#define FMA_256(n) "vfmadd231ps %%ymm12, %%ymm12, %%ymm" #n "\n"
#define FMA_512(n) "vfmadd231ps %%zmm12, %%zmm12, %%zmm" #n "\n"

#define VECTORS(name, products, one)                                                          \
    static double name(void)                                                                  \
    {                                                                                         \
        __asm__ volatile(ONES TWELVE(CLEAR)::: CLOBBERS);                                     \
        BEST(12 * (products), __asm__ volatile(TWELVE(one)::: CLOBBERS))                      \
        __asm__ volatile("vzeroupper" ::: CLOBBERS);                                          \
        return rate;                                                                          \
    }
VECTORS(pairs, 32, PAIRS_256)
VECTORS(vnni, 64, VNNI_512)
VECTORS(fma_256, 8, FMA_256)
VECTORS(fma_512, 16, FMA_512)
#if HAS_BF16
VECTORS(bf16, 32, BF16_512)
#endif

#if HAS_AMX
VECTORS(avx_vnni, 32, VNNI_256)

#define TILES(name, product, products)                                                                \
    static double name(void)                                                                          \
    {                                                                                                 \
        struct tiles shape = {.palette = 1};                                                          \
        if (!may_use_tiles())                                                                         \
            return 0;                                                                                 \
        for (int i = 0; i < 8; i++)                                                                   \
            shape.bytes[i] = 64, shape.rows[i] = 16;                                                  \
        __asm__ volatile("ldtilecfg %0" ::"m"(shape));                                                \
        BEST(4 * (products), __asm__ volatile(product " %%tmm6, %%tmm4, %%tmm0\n"                     \
            product " %%tmm7, %%tmm4, %%tmm1\n" product " %%tmm6, %%tmm5, %%tmm2\n"                   \
            product " %%tmm7, %%tmm5, %%tmm3\n" ::))                                                  \
        __asm__ volatile("tilerelease" ::);                                                           \
        return rate;                                                                                  \
    }
TILES(amx_int8, "tdpbssd", 16 * 16 * 64)
TILES(amx_bf16, "tdpbf16ps", 16 * 16 * 32)
#endif

/* Multiply-adds in a second of one kind of products; 0 where this code, the user's limit, or the operating
 * system does not allow them. */
double nc_peak(int64_t product)
{
    const int64_t may = nc_may_use();
    switch (product) {
    case PRODUCT_INT8_AVX2: return may >> ISA_AVX2 & 1 ? pairs() : 0;
    case PRODUCT_INT8_AVX512_VNNI: return may >> ISA_AVX512_VNNI & 1 ? vnni() : 0;
    case PRODUCT_FP32_AVX2: return may >> ISA_AVX2 & 1 ? fma_256() : 0;
    case PRODUCT_FP32_AVX512: return may >> ISA_AVX512 & 1 ? fma_512() : 0;
#if HAS_BF16
    case PRODUCT_BF16_AVX512_BF16: return may >> ISA_AVX512_BF16 & 1 ? bf16() : 0;
#endif
#if HAS_AMX
    case PRODUCT_INT8_AVX_VNNI: return may >> ISA_AVX_VNNI & 1 ? avx_vnni() : 0;
    case PRODUCT_INT8_AMX: return may >> ISA_AMX & 1 ? amx_int8() : 0;
    case PRODUCT_BF16_AMX: return may >> ISA_AMX & 1 ? amx_bf16() : 0;
#endif
    default: return 0;
    }
}
