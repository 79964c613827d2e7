// A driver without a device: what dslaunch asks of libcuda.so.1, written down call by call. It shows that
// calls arrive with the arguments they should have; it runs nothing.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int success = 0;
constexpr int not_found = 500;
int current = -1;  // the device of this thread; -1: none

int number(const char* name, int otherwise) {
    const char* value = std::getenv(name);
    return value == nullptr ? otherwise : std::atoi(value);
}

void say(const char* format, const void* a = nullptr, unsigned long long b = 0) {
    std::FILE* file = std::fopen(std::getenv("FAKE_DRIVER_LOG"), "a");
    std::fprintf(file, format, a, b);
    std::fclose(file);
}

}  // namespace

extern "C" {

int cuInit(unsigned int) { return success; }
int cuDriverGetVersion(int* version) {
    *version = number("FAKE_DRIVER_VERSION", 12090);
    return success;
}
int cuDeviceGetCount(int* count) {
    *count = 2;
    return success;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return success;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {  // CUdevice_attribute of cuda.h
        case 16: *value = 3; return success;    // MULTIPROCESSOR_COUNT
        case 75: *value = 9; return success;    // COMPUTE_CAPABILITY_MAJOR
        case 76: *value = 0; return success;    // COMPUTE_CAPABILITY_MINOR
        default: *value = 0; return success;
    }
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(0xC0L + device);
    return success;
}
int cuDevicePrimaryCtxRelease_v2(int) { return success; }
int cuCtxSetCurrent(void* context) {
    current = static_cast<int>(reinterpret_cast<long>(context) - 0xC0);
    say("current %p\n", context);
    return success;
}
int cuCtxGetCurrent(void** context) {
    const int device = number("FAKE_DRIVER_CURRENT", current);
    *context = device < 0 ? nullptr : reinterpret_cast<void*>(0xC0L + device);
    return success;
}
int cuCtxGetDevice(int* device) {
    *device = number("FAKE_DRIVER_CURRENT", current);
    return *device < 0 ? 201 : success;
}
int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned int, void*, void*, unsigned int) {
    say("load %p %llu\n", nullptr, static_cast<const unsigned char*>(code)[0]);
    *library = reinterpret_cast<void*>(0x11B);
    return success;
}
int cuLibraryUnload(void*) { return success; }
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
    *kernel = reinterpret_cast<void*>(0xF00 + std::strlen(name));
    return success;
}
int cuLaunchKernel(void* kernel, unsigned int grid, unsigned int, unsigned int, unsigned int block, unsigned int,
                   unsigned int, unsigned int shared, void* stream, void** parameters, void** extra) {
    std::FILE* file = std::fopen(std::getenv("FAKE_DRIVER_LOG"), "a");
    unsigned int header[4];  // of the table: factor, num_runs, num_chunks
    std::memcpy(header, parameters[0], sizeof header);
    std::fprintf(file, "launch %p grid %u block %u shared %u stream %p extra %p runs %u chunks %u\n", kernel, grid, block,
                 shared, stream, static_cast<void*>(extra), header[2], header[3]);
    std::fclose(file);
    return number("FAKE_DRIVER_LAUNCH", success);
}
int cuGetErrorName(int, const char** name) {
    *name = "CUDA_ERROR_OF_A_TEST";
    return success;
}
int cuGetErrorString(int, const char** text) {
    *text = "an error of a test";
    return success;
}

int cuGetProcAddress_v2(const char* name, void** function, int, unsigned long long, int* status) {
    char versioned[200];
    std::snprintf(versioned, sizeof versioned, "%s_v2", name);
    static void* library = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(&cuInit), &info);
        return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }();
    *function = dlsym(library, name);
    if (*function == nullptr) *function = dlsym(library, versioned);
    if (status != nullptr) *status = *function == nullptr ? 1 : 0;
    return *function == nullptr ? not_found : success;
}
int cuGetProcAddress(const char* name, void** function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

}  // extern "C"
