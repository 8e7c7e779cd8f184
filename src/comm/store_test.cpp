// The store and the memory of one host's ranks: access by other users, and when memory is reserved.
#include "comm/store.hpp"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <cstring>
#include <fstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error_testing.hpp"
#include "comm/environment.hpp"
#include "comm/failures.hpp"
#include "comm/shm/members.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto message_of = [](auto&& work) { return error_testing::error_of<Error>(work); };

TEST(LocalStore, KeepsWhatRanksWrite) {
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  LocalStore store(name, 5s);
  store.set("a", std::string("one"));
  EXPECT_EQ(store.get_to_str("a"), "one");
  EXPECT_TRUE(store.check({"a"}));
  EXPECT_FALSE(store.check({"a", "b"}));
  EXPECT_EQ(store.add("count", 2), 2);
  EXPECT_EQ(store.add("count", -5), -3);
  EXPECT_EQ(store.get_to_str("count"), "-3");
  EXPECT_EQ(store.compareSet("a", std::string("two"), std::string("three")), "one");
  EXPECT_EQ(store.compareSet("a", std::string("one"), std::string("three")), "three");
  EXPECT_EQ(store.compareSet("new", std::string(), std::string("first")), "first");
  EXPECT_EQ(store.getNumKeys(), 3);
  EXPECT_TRUE(store.deleteKey("a"));
  EXPECT_FALSE(store.deleteKey("a"));
  const std::string bytes(300000, '\0');
  store.set("empty", std::string());
  store.set("large", bytes + "end");
  EXPECT_EQ(store.get_to_str("empty"), "");
  EXPECT_EQ(store.clone()->get(std::string("large")).size(), bytes.size() + 3);
  EXPECT_THAT(message_of([&] { store.wait({"never"}, 30ms); }), HasSubstr("no never within 30 ms"));
}

TEST(LocalStore, ServesManyRanksAtOnce) {
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  constexpr int kRanks = 16, kEach = 100;
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r)
    ranks.emplace_back([&, r] {
      LocalStore store(name, 20s);
      for (int i = 0; i < kEach; ++i) store.add("sum", r);
      store.set("rank" + std::to_string(r), std::string(1000, 'x'));
      store.wait({"rank" + std::to_string((r + 1) % kRanks)});
    });
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(LocalStore(name, 5s).add("sum", 0), kEach * kRanks * (kRanks - 1) / 2);
}

TEST(LocalStore, OnlyItsUserIsAnswered) {
  const std::string name = new_store_name();
  const uid_t other = ::geteuid() + 1;
  LocalStoreServer foreign(name, other);  // the store sees us as another user
  EXPECT_THAT(message_of([&] { LocalStore(name, 2s).set("group/given-up", std::string("forged")); }),
              HasSubstr("PeerError"));
  EXPECT_THAT(message_of([&] { LocalStore(name, 2s, nullptr, other); }),
              HasSubstr(fmt::format("a store of user {}", ::geteuid())));
  EXPECT_THROW(LocalStoreServer{name}, ConfigError) << "the name is taken";
  EXPECT_THAT(message_of([&] { LocalStore(new_store_name(), 30ms); }),
              HasSubstr("nobody there within 30 ms"));
}

TEST(LocalStore, AnotherUsersProcessIsHungUpOn) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
    const std::string said = message_of([&] {
      LocalStore(name, 2s, nullptr, 0).set("group/given-up", std::string("rank 0 failed: forged"));
    });
    ::_exit(said.find("PeerError") == 0 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(LocalStore(name, 5s).getNumKeys(), 0);
}

TEST(LocalStore, BytesThatAreNoRequestCostTheirSenderAlone) {
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  LocalStore store(name, 5s);
  for (const std::string& bytes :
       {std::string("\xff\xff\xff\xff"), std::string("\x08\0\0\0\xff\0\0\0abcd", 12),
        std::string("GET / HTTP/1.0\r\n\r\n")}) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const int raw = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(::connect(raw, reinterpret_cast<sockaddr*>(&address),
                        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
              0);
    ASSERT_EQ(::write(raw, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    char answer;
    EXPECT_LE(::read(raw, &answer, 1), 0) << "hung up on";
    ::close(raw);
    EXPECT_EQ(store.add("others go on", 1) > 0, true);
  }
}

// The launcher reports a rank that never joined to the ranks that wait for it.
TEST(LocalStore, TheLauncherTellsOfRanksThatEndBeforeTheyJoin) {
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  c10d::PrefixStore store("group world", c10::make_intrusive<c10d::PrefixStore>(
                                             "job", c10::make_intrusive<LocalStore>(name, 5s)));
  EXPECT_EQ(shm::given_up(store), "");
  server.set(kLaunchFailed, "rank 1 (pid 77) was killed by signal 9 (Killed)");
  EXPECT_THAT(shm::given_up(store), HasSubstr("rank 1 (pid 77) was killed"));
  try {
    shm::meet(store, 0, 2, shm::describe_self(), "world", 20s);
    FAIL() << "must throw";
  } catch (const RelayedError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1 (pid 77) was killed by signal 9"));
  }
}

TEST(LocalStore, TheFirstOfALaunchSpeaks) {
  const std::string name = new_store_name();
  LocalStoreServer server(name);
  ::setenv(kLaunchedVariable, name.c_str(), 1);
  EXPECT_TRUE(first_of_launch("one thing"));
  EXPECT_FALSE(first_of_launch("one thing"));
  EXPECT_TRUE(first_of_launch("another"));
  ::unsetenv(kLaunchedVariable);
  EXPECT_TRUE(first_of_launch("one thing")) << "without a launcher everybody does";
}

// ---- memory that is reserved on use ----

// Bytes of memory of a segment that others could still open.
std::int64_t reserved(const shm::Segment& segment) {
  struct stat status {};
  EXPECT_EQ(::fstat(segment.id().descriptor, &status), 0);
  return status.st_blocks * 512;
}

TEST(Segment, ReservesLaterPagesOnUse) {
  constexpr std::int64_t kPage = 4096, kGranule = 64 << 10;
  const auto all = shm::Segment::create(10 * kGranule + 1, "a test");
  EXPECT_EQ(reserved(*all), 10 * kGranule + kPage);
  const auto later = shm::Segment::create(10 * kGranule + 1, kPage, "a test");
  EXPECT_EQ(reserved(*later), kPage);
  later->reserve(later->data(), 0);
  EXPECT_EQ(reserved(*later), kPage);
  later->reserve(later->data() + 3 * kGranule - 1, 1);
  EXPECT_EQ(reserved(*later), kPage + kGranule);
  later->reserve(later->data() + 3 * kGranule - 1, 2);
  EXPECT_EQ(reserved(*later), kPage + 2 * kGranule);
  later->reserve(later->data(), 10 * kGranule + 1);
  EXPECT_EQ(reserved(*later), reserved(*all));
  std::memset(later->data(), 1, 10 * kGranule + 1);
  EXPECT_EQ(reserved(*later), reserved(*all));
}

// The mapping refuses writes, as if there were no memory.
TEST(Segment, RefusesWhereNoPagesAreLeft) {
  const auto later = shm::Segment::create(1 << 20, 4096, "a test");
  ASSERT_EQ(::mprotect(later->data(), 1 << 20, PROT_READ), 0);
  const std::string message = message_of([&] { later->reserve(later->data() + 100'000, 10); });
  EXPECT_THAT(message, HasSubstr("shared memory for a test"));
  EXPECT_THAT(message, HasSubstr("reserving the pages failed"));
  EXPECT_THAT(message, HasSubstr("Free memory"));
  ASSERT_EQ(::mprotect(later->data(), 1 << 20, PROT_READ | PROT_WRITE), 0);
  EXPECT_EQ(message_of([&] { later->reserve(later->data() + 100'000, 10); }), "no error");
}

// Most groups carry a few numbers, so they must not reserve megabytes for staging buffers and rings.
TEST(Segment, OfAGroupIsReservedForWhatItCarries) {
  const auto resident = [] {  // bytes of isograd's shared memory that this process maps
    std::ifstream maps("/proc/self/smaps");
    std::int64_t bytes = 0;
    bool ours = false;
    for (std::string line; std::getline(maps, line);) {
      if (line.find('-') < line.find(':')) ours = line.find("memfd:isograd") != std::string::npos;
      if (ours && line.rfind("Rss:", 0) == 0) bytes += std::stoll(line.substr(4)) * 1024;
    }
    return bytes;
  };
  run_ranks(4, [&](World& world) {
    at::Tensor few = at::ones({3}, at::kDouble);
    world.group.all_reduce(few);
    world.group.barrier();
    if (world.rank == 0) {
      EXPECT_LT(resident(), 1 << 20);
    }
    world.group.barrier();
    at::Tensor many = at::full({1'000'000}, world.rank + 1, at::kDouble);  // through all buffers of each rank
    world.group.all_reduce(many);
    EXPECT_TRUE(many.eq(10).all().item<bool>());
    at::Tensor received = at::zeros_like(many);
    Pending receive = world.group.recv_async(received, world.rank ^ 1);
    world.group.send(many, world.rank ^ 1);
    receive.wait();
    EXPECT_TRUE(received.equal(many));
    world.group.barrier();
    if (world.rank == 0) {
      EXPECT_GT(resident(), 8 << 20);
    }
    world.group.barrier();
  });
}

// ---- forged entries of the store --------------------------------------------------------------------------

std::string opening(int descriptor, std::int32_t owner = ::getpid()) {
  struct stat status {};
  ::fstat(descriptor, &status);
  const shm::SegmentId id{owner, descriptor, status.st_ino, static_cast<std::uint64_t>(status.st_size)};
  return message_of([&] { shm::Segment::open(id, "a test"); });
}

TEST(ForgedSegment, FilesPipesAndDevicesAreNotOpened) {
  char path[] = "/tmp/isograd-forged-XXXXXX";
  const int file = ::mkstemp(path);
  ASSERT_EQ(::ftruncate(file, 4096), 0);
  EXPECT_THAT(opening(file), HasSubstr("no shared memory of isograd"));
  ::unlink(path);
  EXPECT_THAT(opening(file), HasSubstr("no shared memory of isograd"));
  ::close(file);
  const int null = ::open("/dev/null", O_RDWR);
  EXPECT_THAT(opening(null),
              ::testing::AnyOf(HasSubstr("no shared memory of isograd"), HasSubstr("of user")));
  ::close(null);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  EXPECT_THAT(opening(ends[0]), HasSubstr("no shared memory of isograd"));
  for (const int end : ends) ::close(end);
}

TEST(ForgedSegment, AnonymousMemoryOfOtherProgramsOrUnsealedIsNotMapped) {
  const int other = ::memfd_create("other", MFD_ALLOW_SEALING),
            unsealed = ::memfd_create("isograd", MFD_ALLOW_SEALING);
  for (const int memory : {other, unsealed}) ASSERT_EQ(::ftruncate(memory, 4096), 0);
  EXPECT_THAT(opening(other), HasSubstr("no shared memory of isograd"));
  EXPECT_THAT(opening(unsealed), HasSubstr("not sealed"));
  ASSERT_EQ(::fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_EQ(opening(unsealed), "no error") << "as a rank makes it";
  for (const int memory : {other, unsealed}) ::close(memory);
}

TEST(ForgedSegment, AnotherUsersMemoryIsNotMapped) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  int tells[2], ends[2];
  ASSERT_EQ(::pipe(tells), 0);
  ASSERT_EQ(::pipe(ends), 0);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setgid(65534) != 0 || ::setuid(65534) != 0) ::_exit(9);
    const int memory = ::memfd_create("isograd", MFD_ALLOW_SEALING);
    if (::ftruncate(memory, 4096) != 0) ::_exit(9);
    ::fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    struct stat status {};
    ::fstat(memory, &status);
    const shm::SegmentId id{::getpid(), memory, status.st_ino, 4096};
    (void)!::write(tells[1], &id, sizeof(id));
    char byte;
    ::close(ends[1]);
    (void)!::read(ends[0], &byte, 1);
    ::_exit(0);
  }
  shm::SegmentId id;
  ASSERT_EQ(::read(tells[0], &id, sizeof(id)), static_cast<ssize_t>(sizeof(id)));
  EXPECT_THAT(message_of([&] { shm::Segment::open(id, "a test"); }), HasSubstr("the memory of user 65534"));
  for (const int end : {tells[0], tells[1], ends[0], ends[1]}) ::close(end);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace isograd
