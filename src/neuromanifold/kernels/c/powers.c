/* Σ_n g[n, i]² and c Σ_n g[n, i]⁴ on a CPU, for gradients of single samples that are there as they are: biases, scales.

   Some columns at a time, whose sums stay in the nearest cache, in float64; each number is read once.  Columns are
   independent of each other, so sums do not depend on the number of threads.

   Compiled when it is first needed (build.py); any C compiler that knows GCC's vector extensions will do. */

#include <stdint.h>

enum { BLOCK = 512 }; /* columns at a time */

typedef int64_t size;

struct part {
    const float *values;   /* [N, width] */
    size width, stride, at; /* stride of samples; where its sums begin */
};

struct job {
    const struct part *parts;
    float *squares;         /* of all parts, to be added to; so are the next, if they are there */
    double *fourths;
    size count, N;
    double factor, weight;  /* of gradients before they are squared; of fourth powers */
    size next;              /* block of columns that nobody has begun */
};

static void add_block(const struct job *job, const struct part *part, size start)
{
    double sums2[BLOCK] = {0}, sums4[BLOCK] = {0};
    const size count = part->width - start < BLOCK ? part->width - start : BLOCK;
    const double factor = job->factor;
    const float *row = part->values + start;
    for (size n = 0; n < job->N; n++, row += part->stride)
        for (size i = 0; i < count; i++) {
            const double g = factor * row[i], square = g * g;
            sums2[i] += square;
            sums4[i] += square * square;
        }
    start += part->at;
    for (size i = 0; i < count; i++) job->squares[start + i] += (float)sums2[i];
    for (size i = 0; job->fourths && i < count; i++) job->fourths[start + i] += job->weight * sums4[i];
}

static void add_blocks(void *given)
{
    struct job *job = given;
    const struct part *part = job->parts, *end = part + job->count;
    for (size before = 0;;) { /* blocks of the parts before this one */
        const size block = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        for (; part < end && (block - before) * BLOCK >= part->width; part++) before += (part->width + BLOCK - 1) / BLOCK;
        if (part == end) break;
        add_block(job, part, (block - before) * BLOCK);
    }
}

/* It is always done.  `parallel` is OpenMP's, of the library that torch has loaded. */
int add_powers(struct job *job, void (*parallel)(void (*)(void *), void *, unsigned, unsigned), unsigned threads)
{
    job->next = 0;
    if (parallel && threads > 1) parallel(add_blocks, job, threads, 0);
    else add_blocks(job);
    return 1;
}
