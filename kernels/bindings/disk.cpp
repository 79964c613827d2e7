// The Python edge of the disk engine: borrow the memory of an array, hand it to the threads, wait
// without the GIL. Paths, sizes and messages are kernels/disk.py's; here a failure is an errno and the
// byte where it happened.

#include "disk.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>

#include "../disk/file.h"
#include "../disk/pool.h"

namespace nb = nanobind;

namespace dslaunch {
namespace {

using disk::File;
using disk::Pool;
using disk::Request;

// how long Ctrl-C waits for a disk that does not answer
constexpr std::chrono::milliseconds signal_check{200};
constexpr std::int64_t huge_page_bytes = std::int64_t{2} << 20;

template <typename Error, typename... Parts>
[[noreturn]] void refuse(Error error, const Parts&... parts) {
    std::ostringstream out;
    (out << ... << parts);
    throw error(out.str().c_str());
}

// ---- arrays ----------------------------------------------------------------------------------------------

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
    std::int64_t stride = 1;
    for (std::size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) != 1 && array.stride(i) != stride) return false;
        stride *= static_cast<std::int64_t>(array.shape(i));
    }
    return true;
}

nb::ndarray<nb::ro> import_array(nb::handle object, bool is_filled) {
    if (nb::cast<bool>(nb::bool_(nb::getattr(object, "requires_grad", nb::bool_(false))))) {
        refuse(nb::value_error, "array: the tensor requires grad; pass array.detach(), which has the same memory");
    }
    nb::ndarray<nb::ro> array;
    nb::ndarray<> writable;
    if (is_filled && nb::try_cast(object, writable, false)) {
        array = nb::ndarray<nb::ro>(writable);
    } else if (!nb::try_cast(object, array, false)) {
        refuse(nb::type_error, "array: a ", nb::type_name(object.type()).c_str(),
               " gives no access to its memory through DLPack or the buffer protocol; pass a CPU torch.Tensor "
               "(detached, if it requires grad), a numpy array or a bytearray");
    } else if (is_filled) {
        refuse(nb::value_error, "array: it is read-only, but a read fills it; pass a writable one");
    }
    const int device = array.device_type();
    if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
        refuse(nb::value_error, "array: it is on a device (DLPack device type ", device,
               "); it must be in host memory");
    }
    if (array.size() > 0 && !is_contiguous(array)) {
        refuse(nb::value_error, "array: its elements do not follow one another; pass a contiguous array");
    }
    return array;
}

// Memory that starts on a page, or on a huge page where it fills one: then direct I/O needs no copy, and the
// kernel pins few pages.
nb::object aligned_empty(std::int64_t nbytes) {
    if (nbytes < 0) refuse(nb::value_error, "nbytes: ", nbytes, "; must be >= 0");
    const std::int64_t align = nbytes >= huge_page_bytes ? huge_page_bytes : 4096;
    const std::int64_t whole = nbytes == 0 ? align : (nbytes + align - 1) / align * align;
    void* data = nullptr;
    if (posix_memalign(&data, static_cast<std::size_t>(align), static_cast<std::size_t>(whole)) != 0) {
        PyErr_Format(PyExc_MemoryError, "no host memory for %lld bytes", static_cast<long long>(nbytes));
        throw nb::python_error();
    }
    if (align == huge_page_bytes) madvise(data, static_cast<std::size_t>(whole), MADV_HUGEPAGE);
    const nb::capsule owner(data, [](void* memory) noexcept { std::free(memory); });
    const std::size_t shape[1] = {static_cast<std::size_t>(nbytes)};
    return nb::cast(nb::ndarray<nb::array_api, std::uint8_t, nb::device::cpu>(data, 1, shape, owner));
}

// ---- objects ---------------------------------------------------------------------------------------------

struct BoundPool {
    std::shared_ptr<Pool> pool;

    ~BoundPool() { close(); }
    void close() {
        nb::gil_scoped_release release;
        pool->close();
    }
};

// Threads share the file without a reference to a Python object: they must never need the GIL.
struct BoundFile {
    std::shared_ptr<const File> file;
};

struct BoundRequest {
    std::shared_ptr<Pool> pool;
    std::shared_ptr<Request> request;
    nb::ndarray<nb::ro> array;  // borrowed while threads use it
    std::int64_t nbytes;

    BoundRequest(std::shared_ptr<Pool> in, std::shared_ptr<Request> made, nb::ndarray<nb::ro> borrowed)
        : pool(std::move(in)),
          request(std::move(made)),
          array(std::move(borrowed)),
          nbytes(static_cast<std::int64_t>(array.nbytes())) {}
    BoundRequest(BoundRequest&&) = default;

    // The memory must outlive the transfer, whatever the caller dropped.
    ~BoundRequest() {
        if (request == nullptr || request->is_done() || !pool->is_at_home()) return;
        nb::gil_scoped_release release;
        request->wait();
    }
};

void check_home(const Pool& pool) {
    if (pool.is_at_home()) return;
    refuse([](const char* text) { return nb::builtin_exception(nb::exception_type::runtime_error, text); },
           "this DiskEngine was made in process ", pool.home(),
           "; its threads are not in this forked child: make an engine in the child, after the fork");
}

BoundRequest submit(const BoundPool& bound, const BoundFile& bound_file, bool is_write, nb::handle object,
                    std::int64_t offset) {
    check_home(*bound.pool);
    nb::ndarray<nb::ro> array = import_array(object, !is_write);
    const std::int64_t bytes = static_cast<std::int64_t>(array.nbytes());
    const std::shared_ptr<const File>& file = bound_file.file;
    const std::int64_t nbytes = file->layout().nbytes;
    if (offset < 0 || offset > nbytes || bytes > nbytes - offset) {
        refuse(nb::value_error, "offset: ", bytes, " bytes from ", offset, " on do not fit in the file of ", nbytes,
               " bytes");
    }
    char* data = static_cast<char*>(const_cast<void*>(array.data()));
    std::shared_ptr<Request> request;
    {
        nb::gil_scoped_release release;
        request = bound.pool->submit(file, is_write, data, offset, bytes);
    }
    if (request == nullptr) refuse(nb::value_error, "the DiskEngine is closed");
    return BoundRequest(bound.pool, std::move(request), std::move(array));
}

// The errno and the byte of the file; (0, 0) if all went well.
std::pair<int, std::int64_t> wait(BoundRequest& bound) {
    if (!bound.request->is_done()) check_home(*bound.pool);
    for (;;) {
        bool is_done = false;
        {
            nb::gil_scoped_release release;
            is_done = bound.request->wait_for(signal_check);
        }
        if (is_done) break;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    bound.array = nb::ndarray<nb::ro>();
    const disk::Failure failure = bound.request->failure();
    return {failure.error, failure.offset};
}

std::optional<std::tuple<std::int64_t, std::int64_t>> direct_align(int fd) {
    const disk::DirectAlign found = disk::direct_align(fd);
    if (!found.is_known) return std::nullopt;
    return std::make_tuple(found.memory, found.offset);
}

}  // namespace

void bind_disk(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<BoundPool>(m, "DiskPool")
        .def("__init__",
             [](BoundPool* self, int num_threads, std::int64_t block_bytes) {
                 new (self) BoundPool{std::make_shared<Pool>(num_threads, block_bytes)};
             },
             nb::kw_only(), "num_threads"_a, "block_bytes"_a)
        .def("submit", submit, "file"_a, nb::kw_only(), "is_write"_a, "array"_a, "offset"_a)
        .def("check_home", [](const BoundPool& self) { check_home(*self.pool); })
        .def("close", &BoundPool::close);
    nb::class_<BoundFile>(m, "DiskFile")
        .def("__init__",
             [](BoundFile* self, int buffered_fd, int direct_fd, std::int64_t nbytes, std::int64_t padded_bytes,
                std::int64_t page_bytes, std::int64_t memory_align) {
                 const disk::Layout layout{nbytes, padded_bytes, page_bytes, memory_align};
                 new (self) BoundFile{std::make_shared<const File>(buffered_fd, direct_fd, layout)};
             },
             nb::kw_only(), "buffered_fd"_a, "direct_fd"_a, "nbytes"_a, "padded_bytes"_a, "page_bytes"_a,
             "memory_align"_a);
    nb::class_<BoundRequest>(m, "DiskRequest")
        .def_prop_ro("done", [](const BoundRequest& self) { return self.request->is_done(); })
        .def_prop_ro("has_failed",
                     [](const BoundRequest& self) {
                         return self.request->is_done() && self.request->failure().error != 0;
                     })
        .def_ro("nbytes", &BoundRequest::nbytes)
        .def("wait", wait);
    m.def("aligned_empty", aligned_empty, "nbytes"_a);
    m.def("direct_align", direct_align, "fd"_a);
    m.def("file_system", disk::file_system, "fd"_a);
    m.def("probe_direct_read", disk::probe_direct_read, "fd"_a, nb::kw_only(), "page_bytes"_a, "memory_align"_a);
}

}  // namespace dslaunch
