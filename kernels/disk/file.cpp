#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace dslaunch::disk {
namespace {

std::int64_t round_down(std::int64_t value, std::int64_t align) { return value & ~(align - 1); }
std::int64_t round_up(std::int64_t value, std::int64_t align) { return round_down(value + align - 1, align); }

// Reads until `wanted` of the `bytes` are there. `align`: after a short read, where the next one may begin.
Failure read_all(int fd, char* data, std::int64_t offset, std::int64_t bytes, std::int64_t wanted,
                 std::int64_t align) {
    std::int64_t done = 0;
    while (done < wanted) {
        const ssize_t got = pread(fd, data + done, static_cast<std::size_t>(bytes - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return {errno, offset + done};
        if (done + got >= wanted) break;
        const std::int64_t next = round_down(done + got, align);
        if (next == done) return {file_ended, offset + done + got};
        done = next;
    }
    return {};
}

Failure write_all(int fd, const char* data, std::int64_t offset, std::int64_t bytes, std::int64_t align) {
    std::int64_t done = 0;
    while (done < bytes) {
        const ssize_t got = pwrite(fd, data + done, static_cast<std::size_t>(bytes - done), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return {errno, offset + done};
        const std::int64_t next = done + got >= bytes ? bytes : round_down(done + got, align);
        if (next == done) return {EIO, offset + done};  // no progress and no reason
        done = next;
    }
    return {};
}

}  // namespace

BounceBuffer::~BounceBuffer() { std::free(data_); }

char* BounceBuffer::reserve(std::int64_t bytes, std::int64_t align) {
    if (bytes > bytes_ || align > align_) {
        std::free(data_);
        void* fresh = nullptr;
        const bool is_there =
            posix_memalign(&fresh, static_cast<std::size_t>(align), static_cast<std::size_t>(bytes)) == 0;
        data_ = is_there ? static_cast<char*>(fresh) : nullptr;
        bytes_ = is_there ? bytes : 0;
        align_ = is_there ? align : 0;
    }
    return data_;
}

File::File(int buffered_fd, int direct_fd, Layout layout)
    : buffered_fd_(buffered_fd), direct_fd_(direct_fd), layout_(layout) {}

File::~File() {
    close(buffered_fd_);
    if (direct_fd_ >= 0) close(direct_fd_);
}

bool File::is_aligned(const void* data) const {
    return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(layout_.memory_align) == 0;
}

Failure File::read(char* data, std::int64_t offset, std::int64_t bytes, BounceBuffer& bounce) const {
    if (direct_fd_ < 0) {
        const Failure failure = read_all(buffered_fd_, data, offset, bytes, bytes, 1);
        posix_fadvise(buffered_fd_, offset, bytes, POSIX_FADV_DONTNEED);
        return failure;
    }
    const std::int64_t page = layout_.page_bytes;
    const std::int64_t begin = round_down(offset, page);
    const std::int64_t end = round_up(offset + bytes, page);
    if (begin == offset && end == offset + bytes && is_aligned(data)) {
        return read_all(direct_fd_, data, offset, bytes, bytes, page);
    }
    char* pages = bounce.reserve(end - begin, std::max(page, layout_.memory_align));
    if (pages == nullptr) return {ENOMEM, offset};
    const Failure failure = read_all(direct_fd_, pages, begin, end - begin, offset + bytes - begin, page);
    if (failure.error == 0) std::memcpy(data, pages + (offset - begin), static_cast<std::size_t>(bytes));
    return failure;
}

Failure File::write(const char* data, std::int64_t offset, std::int64_t bytes, BounceBuffer& bounce) const {
    if (direct_fd_ < 0) return write_part(data, offset, bytes);
    const std::int64_t page = layout_.page_bytes;
    const std::int64_t end = offset + bytes;
    const std::int64_t first_page = std::min(round_up(offset, page), end);
    std::int64_t last_page = std::max(round_down(end, page), first_page);
    if (end == layout_.nbytes && round_up(end, page) <= layout_.padded_bytes && first_page % page == 0) {
        last_page = round_up(end, page);  // padded: see [Note: parts of a page]
    }
    Failure failure;
    if (offset < first_page) failure = write_part(data, offset, first_page - offset);
    if (failure.error == 0 && first_page < last_page) {
        failure = write_pages(data + (first_page - offset), first_page, last_page - first_page,
                              std::min(end, last_page) - first_page, bounce);
    }
    if (failure.error == 0 && last_page < end) {
        failure = write_part(data + (last_page - offset), last_page, end - last_page);
    }
    return failure;
}

// Writes `bytes` of pages: `data_bytes` of data, then zeros.
Failure File::write_pages(const char* data, std::int64_t offset, std::int64_t bytes, std::int64_t data_bytes,
                          BounceBuffer& bounce) const {
    const std::int64_t page = layout_.page_bytes;
    if (bytes == data_bytes && is_aligned(data)) return write_all(direct_fd_, data, offset, bytes, page);
    char* pages = bounce.reserve(bytes, std::max(page, layout_.memory_align));
    if (pages == nullptr) return {ENOMEM, offset};
    std::memcpy(pages, data, static_cast<std::size_t>(data_bytes));
    std::memset(pages + data_bytes, 0, static_cast<std::size_t>(bytes - data_bytes));
    return write_all(direct_fd_, pages, offset, bytes, page);
}

// Writes through the page cache, and asks for the pages to be written out and forgotten.
Failure File::write_part(const char* data, std::int64_t offset, std::int64_t bytes) const {
    const Failure failure = write_all(buffered_fd_, data, offset, bytes, 1);
    posix_fadvise(buffered_fd_, offset, bytes, POSIX_FADV_DONTNEED);
    return failure;
}

DirectAlign direct_align([[maybe_unused]] int fd) {
#if defined(STATX_DIOALIGN)
    struct statx found{};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0) {
        return {found.stx_dio_mem_align, found.stx_dio_offset_align, true};
    }
#endif
    return {};
}

// Source of the numbers: linux/magic.h and the manual page statfs(2).
std::string file_system(int fd) {
    struct statfs found{};
    if (fstatfs(fd, &found) != 0) return "unknown";
    const auto type = static_cast<std::uint32_t>(found.f_type);
    switch (type) {
        case 0x0000EF53: return "ext4";  // ext2 and ext3 too
        case 0x58465342: return "xfs";
        case 0x9123683E: return "btrfs";
        case 0xF2F52010: return "f2fs";
        case 0x2FC12FC1: return "zfs";
        case 0x01021994: return "tmpfs";
        case 0x858458F6: return "ramfs";
        case 0x794C7630: return "overlay";
        case 0x00006969: return "nfs";
        case 0xFF534D42: return "cifs";
        case 0x0BD00BD0: return "lustre";
        case 0x00C36400: return "ceph";
        case 0x47504653: return "gpfs";
        case 0x65735546: return "fuse";
        case 0x01021997: return "9p";
        default: break;
    }
    std::ostringstream number;
    number << "type 0x" << std::hex << type;
    return number.str();
}

int probe_direct_read(int fd, std::int64_t page_bytes, std::int64_t memory_align) {
    BounceBuffer page;
    char* data = page.reserve(page_bytes, std::max(page_bytes, memory_align));
    if (data == nullptr) return ENOMEM;
    for (;;) {
        if (pread(fd, data, static_cast<std::size_t>(page_bytes), 0) >= 0) return 0;
        if (errno != EINTR) return errno;
    }
}

}  // namespace dslaunch::disk
