// A driver that does nothing and succeeds: enough for cuDNN to plan for a device that is only described. For tests.

#define _GNU_SOURCE
#include <dlfcn.h>
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
