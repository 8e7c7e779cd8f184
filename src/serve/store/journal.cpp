// The journal: a header {magic, position of the first record, checksum}, then records. Numbers are
// little-endian.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "serve/store/store.hpp"

namespace isograd::serve {
namespace {

static_assert(std::endian::native == std::endian::little);

struct JournalHeader {
  std::array<char, 8> magic{'i', 's', 'o', 'g', 'j', 'r', 'n', '1'};
  std::uint64_t base = 0;  // position of the first record
  std::uint64_t sum = 0;
  std::uint64_t right_sum() const { return XXH3_64bits(this, offsetof(JournalHeader, sum)); }
};

// The checksums depend on the position, so that bytes of another place are no record. The length has a
// checksum of its own: otherwise a damaged length that points behind the end would look like a last record
// that is not whole.
struct RecordHeader {
  std::uint32_t length = 0, length_sum = 0;
  std::uint64_t sum = 0;
};

std::uint32_t length_sum(std::uint32_t length, std::uint64_t position) {
  return static_cast<std::uint32_t>(XXH3_64bits_withSeed(&length, sizeof(length), ~position));
}

std::uint64_t record_sum(std::string_view record, std::uint64_t position) {
  return XXH3_64bits_withSeed(record.data(), record.size(), position);
}

[[noreturn]] void refuse_damage(const fs::path& file, std::uint64_t offset) {
  refuse(file.string(), fmt::format("damage at byte {}", offset), "a journal as a server wrote it",
         "Restore the state folder from a copy; the records before that byte are intact");
}

// Calls `record(position after it, bytes)` for every whole record and returns where they end in the file.
template <class Record>
std::uint64_t walk(const fs::path& file, std::string_view text, std::uint64_t base, Record record) {
  std::uint64_t offset = sizeof(JournalHeader);
  while (text.size() - offset >= sizeof(RecordHeader)) {
    const std::uint64_t position = base + offset - sizeof(JournalHeader);
    RecordHeader found;
    std::memcpy(&found, text.data() + offset, sizeof(found));
    const std::string_view rest = text.substr(offset + sizeof(found));
    if (found.length_sum != length_sum(found.length, position)) {
      // After a power cut a file may end in zeros that stand for bytes which never reached the disk.
      if (text.find_first_not_of('\0', offset) == text.npos) break;
      refuse_damage(file, offset);
    }
    if (rest.size() < found.length) break;
    if (found.sum != record_sum(rest.substr(0, found.length), position)) {
      if (rest.size() == found.length) break;
      refuse_damage(file, offset);
    }
    offset += sizeof(found) + found.length;
    record(base + offset - sizeof(JournalHeader), rest.substr(0, found.length));
  }
  return offset;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

std::string header_text(std::uint64_t base) {
  JournalHeader header;
  header.base = base;
  header.sum = header.right_sum();
  return {reinterpret_cast<const char*>(&header), sizeof(header)};
}

std::uint64_t base_of(const fs::path& file, std::string_view text) {
  JournalHeader header;
  if (text.size() < sizeof(header)) refuse_damage(file, 0);  // it was renamed into place: never half there
  std::memcpy(&header, text.data(), sizeof(header));
  if (header.magic != JournalHeader{}.magic || header.sum != header.right_sum()) refuse_damage(file, 0);
  return header.base;
}

}  // namespace

struct Journal::Impl {
  explicit Impl(fs::path path) : file(std::move(path)) {}
  ~Impl() {
    if (descriptor >= 0) ::close(descriptor);
  }
  void open() {
    if (descriptor >= 0) ::close(descriptor);
    descriptor = ::open(file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0) {
      broken = true;
      refuse_file("open", file, errno);
    }
    base = base_of(file, text_of(MappedFile(file)));
  }
  off_t offset_of(std::uint64_t position) const {
    return static_cast<off_t>(position - base + sizeof(JournalHeader));
  }
  // Removes what follows `position` from the file; no append may succeed where that is impossible.
  void cut(std::uint64_t position) {
    end = position;
    broken = ::ftruncate(descriptor, offset_of(position)) != 0;
  }
  const fs::path file;
  std::mutex replacing;  // held before `mutex` by those who replace the file, or sync it, while others append
  std::mutex mutex;
  int descriptor = -1;
  std::uint64_t base = 0, end = 0, synced = 0;
  bool broken = false;
};

Journal::Journal(fs::path file, const std::function<void(std::uint64_t, std::string_view)>& replay)
    : impl_(std::make_unique<Impl>(std::move(file))) {
  Impl& impl = *impl_;
  std::error_code error;
  if (!fs::exists(fs::symlink_status(impl.file, error))) write_file(impl.file, header_text(0));
  impl.open();
  std::uint64_t whole = 0, size = 0;
  {
    const MappedFile mapped(impl.file);
    whole = walk(impl.file, text_of(mapped), impl.base, replay), size = mapped.size();
  }
  impl.end = impl.base + whole - sizeof(JournalHeader);
  if (whole == size) return;
  impl.cut(impl.end);
  if (impl.broken || ::fsync(impl.descriptor) != 0) refuse_file("truncate", impl.file, errno);
}

Journal::~Journal() = default;

std::uint64_t Journal::append(std::string_view record) {
  ISOGRAD_INVARIANT(record.size() <= std::numeric_limits<std::uint32_t>::max(),
                    std::to_string(record.size()));
  Impl& impl = *impl_;
  const std::scoped_lock held(impl.mutex);
  if (impl.broken)
    refuse(impl.file.string(), "a journal that an earlier error left in doubt",
           "one that ends with a whole record", "Free space on the disk and restart the server");
  const auto length = static_cast<std::uint32_t>(record.size());
  RecordHeader header{length, length_sum(length, impl.end), record_sum(record, impl.end)};
  const std::array<iovec, 2> parts{
      {{&header, sizeof(header)}, {const_cast<char*>(record.data()), record.size()}}};
  const std::size_t bytes = sizeof(header) + record.size();
  ssize_t done;
  do done = ::pwritev(impl.descriptor, parts.data(), parts.size(), impl.offset_of(impl.end));
  while (done < 0 && errno == EINTR);
  if (done != static_cast<ssize_t>(bytes)) {
    const int code = done < 0 ? errno : ENOSPC;
    impl.cut(impl.end);
    refuse_file("write", impl.file, code, bytes - static_cast<std::size_t>(std::max<ssize_t>(done, 0)));
  }
  return impl.end += bytes;
}

void Journal::sync() {
  Impl& impl = *impl_;
  const std::scoped_lock alone(impl.replacing);
  std::uint64_t end = 0;
  {
    const std::scoped_lock held(impl.mutex);
    if (impl.broken)  // a later fsync may succeed without what the kernel dropped
      refuse(impl.file.string(), "an fsync or a write that failed before", "a journal on the disk",
             "Free space on the disk and restart the server");
    end = impl.end;
  }
  if (impl.synced == end) return;
  if (::fdatasync(impl.descriptor) != 0) {
    const int code = errno;
    const std::scoped_lock held(impl.mutex);
    impl.broken = true;
    refuse_file("fsync", impl.file, code);
  }
  impl.synced = end;
}

std::uint64_t Journal::position() const {
  const std::scoped_lock held(impl_->mutex);
  return impl_->end;
}

std::uint64_t Journal::begin_of(const fs::path& file) { return base_of(file, text_of(MappedFile(file))); }

void Journal::drop_before(std::uint64_t position) {
  Impl& impl = *impl_;
  const std::scoped_lock alone(impl.replacing);
  if (position == impl.base) return;
  const auto offset = [&](std::uint64_t of) { return static_cast<std::size_t>(impl.offset_of(of)); };
  const std::uint64_t known = this->position();
  AtomicFile file(impl.file);
  const MappedFile mapped(impl.file);
  const std::string_view text = text_of(mapped).substr(0, offset(known));
  bool is_end = position > known;
  walk(impl.file, text, impl.base,
       [&](std::uint64_t after, std::string_view) { is_end |= after == position; });
  ISOGRAD_INVARIANT(is_end, fmt::format("position {} of {} to {}", position, impl.base, known));
  file.write(header_text(position));
  if (position < known) file.write(text.substr(offset(position)));
  const std::scoped_lock held(impl.mutex);
  if (known < impl.end) {  // appended meanwhile
    const MappedFile whole(impl.file);
    file.write(text_of(whole).substr(offset(known), impl.end - known));
  }
  try {
    file.commit();
  } catch (...) {
    impl.open();  // the file may have been replaced before the failure
    throw;
  }
  impl.open();
  impl.synced = impl.end = std::max(impl.end, position);
}

}  // namespace isograd::serve
