/* Instruction sets: which of them the compiler knows, and how code asks for them.
 *
 * NC_EMULATED: tests run all of the code on a CPU with AVX2 alone. A header of theirs gives each intrinsic
 * in portable C, no function has more than the compiler's options allow, and no CPU is asked.
 */
#ifndef NC_ISA_H
#define NC_ISA_H

/* NC_OLD_COMPILER: tests leave out what older compilers do not know. */
#if defined(NC_OLD_COMPILER)
#define KNOWN_FROM(gcc, clang) 0
#elif defined(__clang__)
#define KNOWN_FROM(gcc, clang) (__clang_major__ >= (clang))
#else
#define KNOWN_FROM(gcc, clang) (__GNUC__ >= (gcc))
#endif
#define HAS_BF16 KNOWN_FROM(10, 9)
#define HAS_AVX_VNNI KNOWN_FROM(11, 12)
#if defined(__linux__) /* which lends tiles */
#define HAS_AMX KNOWN_FROM(11, 12)
#else
#define HAS_AMX 0
#endif

/* CODE_FOR(sets) says for which instruction sets a source has code, bit i for number i: all of them, and those
 * that this compiler knows. */
#define UNKNOWN_SETS                                                                                        \
    (!HAS_AVX_VNNI << ISA_AVX_VNNI | !HAS_BF16 << ISA_AVX512_BF16 | !HAS_AMX << ISA_AMX)
#define CODE_FOR(sets)                                                                                      \
    int64_t nc_isas(void) { return (sets) & ~UNKNOWN_SETS; }                                                \
    int64_t nc_written_for(void) { return sets; }

#ifdef NC_EMULATED
#define FOR_CPU(features)
#define CPU_SUPPORTS(feature) 1
#else
#define FOR_CPU(features) __attribute__((target(features)))
#define CPU_SUPPORTS(feature) __builtin_cpu_supports(feature)
#endif

/* sums += products of bytes four by four, and of numbers of bf16 two by two. As assembler: GCC 12 copies the
 * sums before and after each intrinsic, and these are parts of functions whose compiler may not know them.
 * NC_TEST_EVEX: as AVX512-VNNI encodes the instruction of AVX-VNNI, where tests lack the latter. */
#ifdef NC_EMULATED
#define VPDPBUSD_512(sums, x, w) ((sums) = _mm512_dpbusd_epi32(sums, x, w))
#define VPDPBUSD_256(sums, x, w) ((sums) = _mm256_dpbusd_epi32(sums, x, w))
#define VDPBF16PS_512(sums, x, w) ((sums) = (__m512i)_mm512_dpbf16_ps(sums, x, w))
#else
#ifdef NC_TEST_EVEX
#define VNNI_256_FORM "%{evex%} "
#else
#define VNNI_256_FORM "%{vex%} "
#endif
#define VPDPBUSD_512(sums, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w))
#define VPDPBUSD_256(sums, x, w) __asm__(VNNI_256_FORM "vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(x), "x"(w))
#define VDPBF16PS_512(sums, x, w) __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w))
#endif

/* sums += products of words two by two. */
#define VPMADDWD_256(sums, x, w)                                                                            \
    do {                                                                                                    \
        __m256i products;                                                                                   \
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"                                                  \
                : "+x"(sums), "=&x"(products)                                                               \
                : "x"(x), "x"(w));                                                                          \
    } while (0)

/* Compilers don't know that loads of tiles read memory: what was written before this is in it. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

#endif
