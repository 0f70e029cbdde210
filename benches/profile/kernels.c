// Lists the kernels that a program runs, each with its share of the time. The CUDA driver loads this library into any
// program that is started with it:
//
//   cc -O1 -shared -fPIC -o kernels.so benches/profile/kernels.c -ldl
//   CUDA_INJECTION64_PATH=$PWD/kernels.so KERNEL_RUNS=5 ratios gpu-flux2-step-kernels
//
// Counted is what begins after the last pause of 0.1 s, so a program warms up, sleeps, and does what matters KERNEL_RUNS
// times (default 1). The table goes to stderr when the program ends; if KERNEL_TABLE names a file, also there, for a record
// in Markdown with KERNEL_TITLE as its heading.
//
// CUPTI does the recording (libcupti.so.13 or .12 where the loader finds it, or the file that CUPTI names). Its headers are
// not needed: of a kernel's record only fields are read that have stood in the same place since CUPTI 11.

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CONCURRENT_KERNEL = 10, BUFFER = 8 << 20, NAME = 96 };
static const uint64_t PAUSE = 100 * 1000 * 1000;  // ns

// CUpti_ActivityKernel, versions 4 to 11.
struct record {
    uint32_t kind;
    uint8_t launch_settings[12];
    uint64_t start, end;  // ns
    uint8_t launch[72];
    const char *name;
};
_Static_assert(offsetof(struct record, start) == 16 && offsetof(struct record, name) == 104, "fields of CUPTI's records");

struct kernel {
    const char *name;  // CUPTI keeps it for as long as the program runs
    uint64_t start, end;
};

static struct kernel *kernels;
static size_t count, capacity;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int (*next_record)(uint8_t *, size_t, void **);
static int (*flush)(uint32_t);

static void request(uint8_t **buffer, size_t *size, size_t *max_records) {
    *buffer = aligned_alloc(8, BUFFER);
    *size = *buffer ? BUFFER : 0;
    *max_records = 0;
}

static void keep(const struct record *record) {
    if (count == capacity) {
        size_t wanted = capacity ? 2 * capacity : 1 << 16;
        struct kernel *more = realloc(kernels, wanted * sizeof *kernels);
        if (!more) return;
        kernels = more;
        capacity = wanted;
    }
    kernels[count++] = (struct kernel){record->name, record->start, record->end};
}

static void complete(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    void *record = NULL;
    pthread_mutex_lock(&lock);
    while (valid && next_record(buffer, valid, &record) == 0) {
        if (((struct record *)record)->kind == CONCURRENT_KERNEL) keep(record);
    }
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static int by_start(const void *a, const void *b) {
    uint64_t x = ((const struct kernel *)a)->start, y = ((const struct kernel *)b)->start;
    return (x > y) - (x < y);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const struct kernel *)a)->name, ((const struct kernel *)b)->name);
}

struct line {
    const char *name;
    size_t calls;
    double ns;
};

static int by_time(const void *a, const void *b) {
    double x = ((const struct line *)a)->ns, y = ((const struct line *)b)->ns;
    return (x < y) - (x > y);
}

// The name as it is written in C++, if the C++ library is there.
static void print_name(FILE *to, const char *name) {
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY);
    char *(*demangle)(const char *, char *, size_t *, int *) = library ? dlsym(library, "__cxa_demangle") : NULL;
    char *clear = demangle ? demangle(name, NULL, NULL, NULL) : NULL;
    const char *shown = clear ? clear : name;
    if (strncmp(shown, "void ", 5) == 0) shown += 5;
    fprintf(to, "%.*s", NAME, shown);
    free(clear);
}

// The record: what takes a thousandth of the time or more.
static void write_table(const char *path, const struct line *lines, size_t names, double runs, double sum, const char *summary) {
    FILE *file = fopen(path, "w");
    if (!file) {
        fprintf(stderr, "kernels: cannot write %s\n", path);
        return;
    }
    const char *title = getenv("KERNEL_TITLE");
    fprintf(file, "# %s\n\nWritten by `benches/profile/kernels.c`: %s.\n\n", title ? title : "Kernels", summary);
    fprintf(file, "| share | ms | calls | us each | kernel |\n|---:|---:|---:|---:|---|\n");
    double rest = 0;
    size_t left = 0;
    for (size_t i = 0; i < names; i++) {
        if (lines[i].ns < sum / 1000) {
            rest += lines[i].ns;
            left += lines[i].calls;
            continue;
        }
        fprintf(file, "| %.1f %% | %.3f | %.1f | %.2f | `", 100 * lines[i].ns / sum, lines[i].ns / runs / 1e6,
                (double)lines[i].calls / runs, lines[i].ns / (double)lines[i].calls / 1e3);
        print_name(file, lines[i].name);
        fprintf(file, "` |\n");
    }
    if (left) fprintf(file, "| %.1f %% | %.3f | %.1f | | others |\n", 100 * rest / sum, rest / runs / 1e6, (double)left / runs);
    fclose(file);
}

static void report(void) {
    flush(1);
    pthread_mutex_lock(&lock);
    qsort(kernels, count, sizeof *kernels, by_start);
    size_t first = 0;
    uint64_t end = count ? kernels[0].end : 0;
    for (size_t i = 1; i < count; i++) {
        if (kernels[i].start > end + PAUSE) first = i;
        if (kernels[i].end > end) end = kernels[i].end;
    }
    struct kernel *counted = kernels + first;
    size_t calls = count - first;
    const char *runs_text = getenv("KERNEL_RUNS");
    double runs = runs_text && atof(runs_text) > 0 ? atof(runs_text) : 1;
    if (calls == 0) {
        fprintf(stderr, "kernels: none was seen\n");
        return;
    }
    // Time in which nothing runs, and the sum over kernels, which may overlap.
    uint64_t span = end - counted[0].start, busy_until = counted[0].start, idle = 0;
    double sum = 0;
    for (size_t i = 0; i < calls; i++) {
        if (counted[i].start > busy_until) idle += counted[i].start - busy_until;
        if (counted[i].end > busy_until) busy_until = counted[i].end;
        sum += (double)(counted[i].end - counted[i].start);
    }
    qsort(counted, calls, sizeof *counted, by_name);
    struct line *lines = calloc(calls, sizeof *lines);
    size_t names = 0;
    for (size_t i = 0; lines && i < calls; i++) {
        if (i == 0 || strcmp(counted[i].name, counted[i - 1].name) != 0) lines[names++].name = counted[i].name;
        lines[names - 1].calls++;
        lines[names - 1].ns += (double)(counted[i].end - counted[i].start);
    }
    qsort(lines, names, sizeof *lines, by_time);
    char summary[256];
    snprintf(summary, sizeof summary,
             "kernels of one of %.0f runs, %.1f of them, %.3f ms from the first to the last, nothing runs in %.3f ms", runs,
             (double)calls / runs, (double)span / runs / 1e6, (double)idle / runs / 1e6);
    fprintf(stderr, "%s\n", summary);
    fprintf(stderr, "%8s %10s %7s %10s  kernel\n", "calls", "ms", "share", "us each");
    for (size_t i = 0; i < names; i++) {
        fprintf(stderr, "%8.1f %10.3f %6.1f%% %10.2f  ", (double)lines[i].calls / runs, lines[i].ns / runs / 1e6,
                100 * lines[i].ns / sum, lines[i].ns / (double)lines[i].calls / 1e3);
        print_name(stderr, lines[i].name);
        fprintf(stderr, "\n");
    }
    const char *path = getenv("KERNEL_TABLE");
    if (lines && path && *path) write_table(path, lines, names, runs, sum, summary);
    free(lines);
    pthread_mutex_unlock(&lock);
}

// Called by the driver.
int InitializeInjection(void) {
    const char *names[] = {getenv("CUPTI"), "libcupti.so.13", "libcupti.so.12", "libcupti.so"};
    void *cupti = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names && !cupti; i++) {
        if (names[i]) cupti = dlopen(names[i], RTLD_NOW | RTLD_GLOBAL);
    }
    if (!cupti) {
        fprintf(stderr, "kernels: no CUPTI: %s\n", dlerror());
        return 1;
    }
    int (*callbacks)(void (*)(uint8_t **, size_t *, size_t *), void (*)(void *, uint32_t, uint8_t *, size_t, size_t)) =
        dlsym(cupti, "cuptiActivityRegisterCallbacks");
    int (*enable)(uint32_t) = dlsym(cupti, "cuptiActivityEnable");
    next_record = dlsym(cupti, "cuptiActivityGetNextRecord");
    flush = dlsym(cupti, "cuptiActivityFlushAll");
    if (!callbacks || !enable || !next_record || !flush) {
        fprintf(stderr, "kernels: this CUPTI lacks a function\n");
        return 1;
    }
    int status = callbacks(request, complete);
    if (status == 0) status = enable(CONCURRENT_KERNEL);
    if (status != 0) {
        fprintf(stderr, "kernels: CUPTI refuses: %d\n", status);
        return 1;
    }
    return atexit(report) == 0;
}
