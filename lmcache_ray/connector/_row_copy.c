/* Row copies between a shard's bytes and the planes of some KV memory, without the interpreter's lock.
 *
 * A plane is one layer's keys or values: rows of equal size that are found by number in the KV memory and lie one after
 * the other in the shard. Engines hand out blocks of adjacent rows, so the rows of a chunk are first taken together
 * into runs, and each run of each plane is one copy.
 *
 * The copies are bound by memory, and by how soon the next lines are asked for:
 *
 * - Long runs are written with streaming (non-temporal) stores. They do not fetch the lines that they overwrite, and
 *   leave the caches to the engine: a stored chunk is read by somebody else, later.
 * - A block of rows ends after a few KiB, where the processor's own prefetching stops. So what comes next is asked for
 *   here, across the end of one run into the next, wherever that lies.
 * - Two planes are copied side by side, line by line: twice the loads are under way at any time.
 * - A run is copied from its end down where going up would make the processor take its loads for its last stores.
 *
 * A fence stands before the first store and after the last one. A slot's word, stored before and after by the caller,
 * is thus seen by other processes in its place, although streaming stores are not ordered by themselves.
 *
 * Bounds are checked before the first byte moves, on the runs: row numbers are read once, because the caller's other
 * threads may change them meanwhile. Nothing is interpreted, and memory is allocated for the runs alone.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CAN_STREAM 1
#include <immintrin.h>
#else
#define CAN_STREAM 0
#endif

enum {
    LINE = 64,            /* bytes of a cache line */
    STEP = 2 * LINE,      /* bytes that a turn of the copying loop moves */
    LANE = 32,            /* bytes of one streaming store */
    AHEAD = 512,          /* bytes between what is copied and what is asked for */
    STREAM_FROM = 256,    /* shorter runs are copied plainly */
    PAGE = 4096,          /* addresses that differ by a multiple look alike to the processor at first sight */
    PENDING = 2048,       /* bytes whose stores may not have left the processor yet */
    FORMAT = 1,           /* changes with `Plane` and with the functions' arguments */
};

/* As `row_copy.py` packs it: five int64. */
typedef struct {
    int64_t address;    /* of the plane's row 0 in the KV memory */
    int64_t num_rows;   /* that the plane has there */
    int64_t stride;     /* bytes from one row to the next in the KV memory */
    int64_t offset;     /* bytes from the shard's start to the plane's row 0 there */
    int64_t row_nbytes; /* of one row */
} Plane;

typedef struct {
    int64_t first; /* row of the KV memory */
    int64_t count; /* adjacent rows */
} Run;

typedef struct {
    const Run *runs;
    Py_ssize_t num_runs;
    char *shard;
    int64_t first_row; /* of the shard */
    int into_shard;
    int streaming;
} Task;

typedef struct {
    char *target;
    const char *source;
    const char *next; /* the source of the copy after this one */
} Copy;

#if CAN_STREAM
#define WITH_AVX2 __attribute__((target("avx2")))

/* Moves bytes [at, at + STEP) and asks for those of `soon`. */
WITH_AVX2 static inline void turn(const Copy *copy, size_t at, const char *soon)
{
    _mm_prefetch(soon, _MM_HINT_NTA);
    _mm_prefetch(soon + LINE, _MM_HINT_NTA);
    const char *source = copy->source + at;
    char *target = copy->target + at;
    const __m256i a = _mm256_loadu_si256((const __m256i *)source);
    const __m256i b = _mm256_loadu_si256((const __m256i *)(source + LANE));
    const __m256i c = _mm256_loadu_si256((const __m256i *)(source + 2 * LANE));
    const __m256i d = _mm256_loadu_si256((const __m256i *)(source + 3 * LANE));
    _mm256_stream_si256((__m256i *)target, a);
    _mm256_stream_si256((__m256i *)(target + LANE), b);
    _mm256_stream_si256((__m256i *)(target + 2 * LANE), c);
    _mm256_stream_si256((__m256i *)(target + 3 * LANE), d);
}

/* Copies `nbytes` for each of `num_copies`, side by side, from the first byte on. Targets are aligned to LANE.
 * Compiled once for each number of copies. */
WITH_AVX2 __attribute__((always_inline)) static inline void stream_up(const Copy *copies, int num_copies, size_t nbytes)
{
    const size_t ahead = nbytes < AHEAD ? nbytes : AHEAD;
    size_t at = 0;
    for (; at + STEP <= nbytes; at += STEP)
        for (int each = 0; each < num_copies; each++) {
            const Copy *copy = &copies[each];
            const size_t soon = at + ahead;
            turn(copy, at, soon < nbytes ? copy->source + soon : copy->next + (soon - nbytes));
        }
    for (int each = 0; each < num_copies; each++)
        memcpy(copies[each].target + at, copies[each].source + at, nbytes - at);
}

/* The same from the last byte down. */
WITH_AVX2 __attribute__((always_inline)) static inline void stream_down(const Copy *copies, int num_copies, size_t nbytes)
{
    const size_t ahead = nbytes < AHEAD ? nbytes : AHEAD;
    size_t at = nbytes - nbytes % STEP;
    for (int each = 0; each < num_copies; each++)
        memcpy(copies[each].target + at, copies[each].source + at, nbytes - at);
    while (at > 0) {
        at -= STEP;
        for (int each = 0; each < num_copies; each++) {
            const Copy *copy = &copies[each];
            turn(copy, at, at >= ahead ? copy->source + at - ahead : copy->next + nbytes + at - ahead);
        }
    }
}

/* Whether going up would load from places that look like those just stored to. Processors compare the low 12 bits of
 * addresses first, and hold a load back until such a store is done: a copy then runs at a fifth of its speed. */
static int stalls_up(const char *target, const char *source)
{
    const uintptr_t distance = ((uintptr_t)target - (uintptr_t)source) & (PAGE - 1);
    return 0 < distance && distance < PENDING;
}

static int stalls_down(const char *target, const char *source) { return stalls_up(source, target); }

WITH_AVX2 static void stream_one(Copy copy, size_t nbytes)
{
    if (stalls_up(copy.target, copy.source))
        stream_down(&copy, 1, nbytes);
    else
        stream_up(&copy, 1, nbytes);
}

WITH_AVX2 static void stream_two(const Copy *copies, size_t nbytes)
{
    int up = 1, down = 1;
    for (int to = 0; to < 2; to++)
        for (int from = 0; from < 2; from++) {
            up = up && !stalls_up(copies[to].target, copies[from].source);
            down = down && !stalls_down(copies[to].target, copies[from].source);
        }
    if (up)
        stream_up(copies, 2, nbytes);
    else if (down)
        stream_down(copies, 2, nbytes);
    else {
        stream_one(copies[0], nbytes);
        stream_one(copies[1], nbytes);
    }
}

/* Copies what stands before the first place of the target that is aligned to LANE; answers how much that was. */
static size_t align(Copy *copy)
{
    const size_t head = -(uintptr_t)copy->target & (LANE - 1);
    memcpy(copy->target, copy->source, head);
    copy->target += head;
    copy->source += head;
    return head;
}

static void stream_all(Copy *copies, int num_copies, size_t nbytes)
{
    size_t left[2];
    for (int each = 0; each < num_copies; each++)
        left[each] = nbytes - align(&copies[each]);
    if (num_copies == 2 && left[0] == left[1])
        stream_two(copies, left[0]);
    else
        for (int each = 0; each < num_copies; each++)
            stream_one(copies[each], left[each]);
}

static int has_streaming(void) { return __builtin_cpu_supports("avx2"); }

static void fence(int streaming)
{
    if (streaming)
        _mm_sfence();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#else
static void stream_all(Copy *copies, int num_copies, size_t nbytes)
{
    for (int each = 0; each < num_copies; each++)
        memcpy(copies[each].target, copies[each].source, nbytes);
}

static int has_streaming(void) { return 0; }

static void fence(int streaming)
{
    (void)streaming;
#if defined(__GNUC__) || defined(__clang__)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
#endif

static char *row_address(const Plane *plane, int64_t row)
{
    return (char *)(uintptr_t)(plane->address + row * plane->stride);
}

/* Copies all runs of one or two planes, which have rows of one size and no gaps between them. */
static void copy_planes(const Task *task, const Plane *planes, int num_planes)
{
    const int64_t row_nbytes = planes[0].row_nbytes;
    int64_t done = task->first_row * row_nbytes;
    for (Py_ssize_t at = 0; at < task->num_runs; at++) {
        const Run *run = &task->runs[at];
        const Run *next = at + 1 < task->num_runs ? run + 1 : task->runs; /* then most likely of the planes that follow */
        const size_t nbytes = (size_t)(run->count * row_nbytes);
        Copy copies[2];
        for (int each = 0; each < num_planes; each++) {
            const Plane *plane = &planes[each];
            char *in_shard = task->shard + plane->offset + done;
            char *in_kv = row_address(plane, run->first);
            copies[each] = task->into_shard ? (Copy){in_shard, in_kv, row_address(plane, next->first)}
                                            : (Copy){in_kv, in_shard, in_shard + nbytes};
        }
        if (task->streaming && nbytes >= STREAM_FROM)
            stream_all(copies, num_planes, nbytes);
        else
            for (int each = 0; each < num_planes; each++)
                memcpy(copies[each].target, copies[each].source, nbytes);
        done += (int64_t)nbytes;
    }
}

/* Copies row by row: the plane's rows have gaps between them. */
static void copy_rows(const Task *task, const Plane *plane)
{
    char *in_shard = task->shard + plane->offset + task->first_row * plane->row_nbytes;
    for (Py_ssize_t at = 0; at < task->num_runs; at++) {
        for (int64_t row = 0; row < task->runs[at].count; row++) {
            char *in_kv = row_address(plane, task->runs[at].first + row);
            memcpy(task->into_shard ? in_shard : in_kv, task->into_shard ? in_kv : in_shard, (size_t)plane->row_nbytes);
            in_shard += plane->row_nbytes;
        }
    }
}

static int is_dense(const Plane *plane) { return plane->stride == plane->row_nbytes; }

static void copy_all(const Task *task, const Plane *planes, Py_ssize_t num_planes)
{
    fence(task->streaming);
    for (Py_ssize_t at = 0; at < num_planes; at++) {
        const Plane *plane = &planes[at];
        if (!is_dense(plane))
            copy_rows(task, plane);
        else if (at + 1 < num_planes && is_dense(plane + 1) && plane[1].row_nbytes == plane->row_nbytes) {
            copy_planes(task, plane, 2);
            at++;
        } else
            copy_planes(task, plane, 1);
    }
    fence(task->streaming);
}

/* Takes rows together into runs; answers how many, at most `num_rows`. */
static Py_ssize_t find_runs(const int64_t *rows, Py_ssize_t num_rows, Run *runs)
{
    Py_ssize_t num_runs = 0;
    for (Py_ssize_t at = 0; at < num_rows; at++) {
        const int64_t row = rows[at];
        Run *last = num_runs ? &runs[num_runs - 1] : NULL;
        if (last != NULL && row > last->first && row - 1 == last->first + (last->count - 1))
            last->count++;
        else
            runs[num_runs++] = (Run){row, 1};
    }
    return num_runs;
}

/* 0 if every copy stays inside its memory, else -1 with ValueError set. */
static int check(const Plane *planes, Py_ssize_t num_planes, const Task *task, Py_ssize_t num_rows,
                 Py_ssize_t shard_nbytes)
{
    int64_t least = 0, most = -1;
    for (Py_ssize_t at = 0; at < task->num_runs; at++) {
        const int64_t first = task->runs[at].first, last = first + (task->runs[at].count - 1);
        least = first < least ? first : least;
        most = last > most ? last : most;
    }
    if (task->first_row < 0 || least < 0) {
        PyErr_Format(PyExc_ValueError, "rows are counted from 0; got row %lld, first_row %lld", (long long)least,
                     (long long)task->first_row);
        return -1;
    }
    for (Py_ssize_t at = 0; at < num_planes; at++) {
        const Plane *plane = &planes[at];
        if (plane->row_nbytes < 1 || plane->offset < 0) {
            PyErr_Format(PyExc_ValueError, "plane %zd has rows of %lld bytes at offset %lld", at,
                         (long long)plane->row_nbytes, (long long)plane->offset);
            return -1;
        }
        const int64_t room = (shard_nbytes - plane->offset) / plane->row_nbytes; /* rows from the plane's start on */
        if (most >= plane->num_rows || task->first_row > room || num_rows > room - task->first_row) {
            PyErr_Format(PyExc_ValueError,
                         "plane %zd: KV row %lld of %lld, %zd rows from row %lld on of %lld in the shard: out of range",
                         at, (long long)most, (long long)plane->num_rows, num_rows, (long long)task->first_row,
                         (long long)room);
            return -1;
        }
    }
    return 0;
}

static PyObject *copy(PyObject *args, int into_shard)
{
    Py_buffer planes, rows, shard;
    Py_ssize_t first_row;
    int streaming;
    if (!PyArg_ParseTuple(args, into_shard ? "y*y*w*np" : "y*y*y*np", &planes, &rows, &shard, &first_row, &streaming))
        return NULL;
    const Py_ssize_t num_planes = planes.len / (Py_ssize_t)sizeof(Plane);
    const Py_ssize_t num_rows = rows.len / (Py_ssize_t)sizeof(int64_t);
    PyObject *result = NULL;
    Run *runs = PyMem_Malloc(sizeof(Run) * (size_t)(num_rows ? num_rows : 1));
    if (runs == NULL)
        PyErr_NoMemory();
    else {
        const Py_ssize_t num_runs = find_runs(rows.buf, num_rows, runs);
        const Task task = {runs, num_runs, shard.buf, first_row, into_shard, streaming && has_streaming()};
        if (check(planes.buf, num_planes, &task, num_rows, shard.len) == 0) {
            Py_BEGIN_ALLOW_THREADS
            copy_all(&task, planes.buf, num_planes);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
    }
    PyMem_Free(runs);
    PyBuffer_Release(&planes);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&shard);
    return result;
}

static PyObject *gather(PyObject *module, PyObject *args)
{
    (void)module;
    return copy(args, 1);
}

static PyObject *scatter(PyObject *module, PyObject *args)
{
    (void)module;
    return copy(args, 0);
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS,
     "gather(planes, rows, shard, first_row, streaming): copy KV rows into the shard from its row `first_row` on."},
    {"scatter", scatter, METH_VARARGS,
     "scatter(planes, rows, shard, first_row, streaming): copy the shard's rows from `first_row` on into KV rows."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_row_copy",
    .m_doc = "Row copies between a shard and the planes of KV memory, without the interpreter's lock.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__row_copy(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "FORMAT", FORMAT) < 0)
        Py_CLEAR(module);
    return module;
}
