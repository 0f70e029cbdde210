// A driver that does nothing and succeeds: enough for cuDNN to plan for a device that is only described. For tests.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int cuInit(unsigned flags) {
    (void)flags;
    return 0;
}

// Stands for every function that is not here. The number of arguments does not matter: the caller cleans up.
static int not_supported(void) { return 801; }

EXPORT int cuDriverGetVersion(int* version) {
    *version = 13010;
    return 0;
}

EXPORT int cuCtxGetCurrent(void** context) {
    *context = (void*)0x1000;
    return 0;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

EXPORT int cuDeviceGetCount(int* count) {
    *count = 1;
    return 0;
}

EXPORT int cuModuleLoadData(void** module, const void* image) {
    (void)image;
    *module = (void*)0x2000;
    return 0;
}

EXPORT int cuLibraryLoadData(void** library, const void* image) {
    (void)image;
    *library = (void*)0x3000;
    return 0;
}

EXPORT int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
    (void)library, (void)name;
    *kernel = (void*)0x4000;
    return 0;
}

EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
    (void)module, (void)name;
    *function = (void*)0x5000;
    return 0;
}

EXPORT int cuOccupancyMaxPotentialClusterSize(int* size) {
    *size = 8;
    return 0;
}

EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
    (void)version, (void)flags;
    void* found = strncmp(name, "cuGetProcAddress", 16) == 0 ? (void*)cuGetProcAddress_v2 : dlsym(RTLD_DEFAULT, name);
    *function = found ? found : (void*)not_supported;
    if (status) *status = 0;
    return 0;
}

EXPORT int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, 0);
}

// What kernels that are compiled at run time ask for before they are planned; nothing here links or runs them.
#define NOTHING(name) \
    EXPORT int name(void) { return 0; }
NOTHING(cuCtxPushCurrent)
NOTHING(cuKernelSetAttribute)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx)
NOTHING(cuLibraryLoadFromFile)
NOTHING(cuLibraryUnload)
NOTHING(cuLinkAddData)
NOTHING(cuLinkDestroy)

// Where the compiler keeps its results; without one it keeps none.
EXPORT int cuGetExportTable(const void** table, const void* id) {
    (void)id;
    *table = 0;
    return not_supported();
}

EXPORT int cuLinkCreate(unsigned count, void* options, void** values, void** state) {
    (void)count, (void)options, (void)values;
    *state = (void*)0x6000;
    return 0;
}

EXPORT int cuLinkComplete(void* state, void** image, size_t* size) {
    static char nothing[64];
    (void)state;
    *image = nothing;
    *size = sizeof(nothing);
    return 0;
}

EXPORT int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return 0;
}

EXPORT int cuCtxGetLimit(size_t* value, int limit) {
    (void)limit;
    *value = 0;
    return 0;
}

EXPORT int cuCtxPopCurrent(void** context) { return cuCtxGetCurrent(context); }

EXPORT int cuStreamGetCtx(void* stream, void** context) {
    (void)stream;
    return cuCtxGetCurrent(context);
}

EXPORT int cuGetErrorName(int error, const char** text) {
    (void)error;
    *text = "no error";
    return 0;
}

EXPORT int cuGetErrorString(int error, const char** text) { return cuGetErrorName(error, text); }
