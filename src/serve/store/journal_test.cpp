// The journal: whatever is cut, killed or full, the records that were accepted come back, and no others.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "serve/store/store.hpp"
#include "serve/store/store_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::HasSubstr;
using Records = std::vector<std::string>;

Records records_of(const fs::path& file) {
  Records found;
  const Journal journal(file, [&](std::uint64_t, std::string_view record) { found.emplace_back(record); });
  return found;
}

// Random bytes of many lengths, among them none.
Records made(int count, unsigned seed, std::size_t longest = 40) {
  std::mt19937 random(seed);
  Records records(static_cast<std::size_t>(count));
  for (std::string& record : records) {
    record.resize(random() % (longest + 1));
    for (char& byte : record) byte = static_cast<char>(random());
  }
  records.back() = "last";
  return records;
}

class JournalTest : public store_testing::Folder {
 protected:
  fs::path file() const { return directory_ / "journal"; }
  // The sizes of the file after each record.
  std::vector<std::uint64_t> write(const Records& records) {
    std::vector<std::uint64_t> sizes;
    Journal journal(file(), [](auto, auto) {});
    for (const std::string& record : records) {
      journal.append(record);
      sizes.push_back(fs::file_size(file()));
    }
    return sizes;
  }
};

TEST_F(JournalTest, ReplaysInOrderWithThePositionsOfAppend) {
  const Records records = made(50, 1);
  std::vector<std::uint64_t> given, replayed;
  {
    Journal journal(file(), [](auto, auto) { FAIL() << "a new journal has no record"; });
    EXPECT_EQ(journal.position(), 0u);
    for (const std::string& record : records) given.push_back(journal.append(record));
    EXPECT_EQ(journal.position(), given.back());
  }
  Records found;
  const Journal journal(file(), [&](std::uint64_t position, std::string_view record) {
    replayed.push_back(position);
    found.emplace_back(record);
  });
  EXPECT_EQ(found, records);
  EXPECT_EQ(replayed, given);
  EXPECT_EQ(journal.position(), given.back());
}

TEST_F(JournalTest, CutAtEveryByteOfItsRecords) {
  const Records records = made(10, 2);
  const auto sizes = write(records);
  const std::string whole = read_file(file());
  ASSERT_EQ(whole.size(), sizes.back());
  for (std::size_t cut = 24; cut <= whole.size(); ++cut) {  // behind the header, which is never half there
    write_file(file(), std::string_view(whole).substr(0, cut));
    const auto kept = std::upper_bound(sizes.begin(), sizes.end(), cut) - sizes.begin();
    Records expected(records.begin(), records.begin() + kept);
    EXPECT_EQ(records_of(file()), expected) << cut;
    write({"more"});
    expected.push_back("more");
    EXPECT_EQ(records_of(file()), expected) << cut;
  }
}

TEST_F(JournalTest, ZerosAtTheEndAreCutOff) {
  const Records records = made(3, 3);
  write(records);
  fs::resize_file(file(), fs::file_size(file()) + 5000);
  EXPECT_EQ(records_of(file()), records);
}

TEST_F(JournalTest, AnyFlippedBitBeforeTheLastRecordIsRefused) {
  const auto sizes = write(made(6, 4));
  const std::string whole = read_file(file());
  for (std::size_t bit = 0; bit < 8 * sizes[4]; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    write_file(file(), damaged);
    ASSERT_THAT(error_of([&] { records_of(file()); }), HasSubstr("damage at byte")) << bit;
    ASSERT_EQ(read_file(file()), damaged) << "a damaged journal was changed";
  }
}

TEST_F(JournalTest, RecordsInAnotherOrderAreRefused) {
  const auto sizes = write({"one", "two", "six"});
  std::string text = read_file(file());
  const std::size_t length = sizes[1] - sizes[0];
  std::swap_ranges(text.begin() + static_cast<long>(sizes[0] - length),
                   text.begin() + static_cast<long>(sizes[0]), text.begin() + static_cast<long>(sizes[0]));
  write_file(file(), text);
  EXPECT_THAT(error_of([&] { records_of(file()); }), HasSubstr("damage"));
}

TEST_F(JournalTest, AFullDiskRefusesTheRecordAndLeavesTheJournalAsItWas) {
  Journal journal(file(), [](auto, auto) {});
  journal.append("before");
  const auto position = journal.position(), size = fs::file_size(file());
  for (const rlim_t room : {0, 3, 16, 500}) {
    const store_testing::FullDisk full(size + room);
    EXPECT_THAT(error_of([&] { journal.append(std::string(1000, 'x')); }), HasSubstr("bytes free"));
    EXPECT_EQ(journal.position(), position);
    EXPECT_EQ(fs::file_size(file()), size);
  }
  {
    const store_testing::FullDisk full(size + 40);
    journal.append("fits");
  }
  journal.append(std::string(1000, 'y'));
  EXPECT_EQ(records_of(file()), (Records{"before", "fits", std::string(1000, 'y')}));
}

TEST_F(JournalTest, ASyncCoversAllThatWasAppendedAndAFailedOneEndsAppending) {
  Journal journal(file(), [](auto, auto) {});
  const int before = store_testing::syncs;
  journal.sync();
  for (int i = 0; i < 10; ++i) journal.append("ten");
  EXPECT_EQ(store_testing::syncs, before);
  journal.sync(), journal.sync();
  EXPECT_EQ(store_testing::syncs, before + 1);
  journal.append("lost, perhaps");
  store_testing::syncs_fail = true;
  EXPECT_THAT(error_of([&] { journal.sync(); }), HasSubstr("fsync"));
  store_testing::syncs_fail = false;
  EXPECT_THAT(error_of([&] { journal.append("later"); }), HasSubstr("restart the server"));
  EXPECT_EQ(records_of(file()).size(), 11u);
}

TEST_F(JournalTest, DropBeforeKeepsPositionsAndWhatFollows) {
  const Records records = made(20, 5);
  std::vector<std::uint64_t> positions;
  {
    Journal journal(file(), [](auto, auto) {});
    for (const std::string& record : records) positions.push_back(journal.append(record));
    journal.drop_before(positions[11]);
    EXPECT_EQ(journal.position(), positions.back());
    {
      const store_testing::FullDisk full(30);
      EXPECT_THAT(error_of([&] { journal.drop_before(positions[12]); }), HasSubstr("bytes free"));
    }
    positions.push_back(journal.append("after"));
    EXPECT_THROW(journal.drop_before(positions[13] + 1), BrokenInvariant);
  }
  Records expected(records.begin() + 12, records.end()), found;
  expected.push_back("after");
  std::vector<std::uint64_t> seen;
  Journal journal(file(), [&](std::uint64_t position, std::string_view record) {
    seen.push_back(position);
    found.emplace_back(record);
  });
  EXPECT_EQ(found, expected);
  EXPECT_EQ(seen, std::vector<std::uint64_t>(positions.begin() + 12, positions.end()));
  journal.drop_before(journal.position());
  EXPECT_EQ(records_of(file()), Records{});
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
}

TEST_F(JournalTest, ManyThreadsAppendWithSyncAndADropBetween) {
  std::multiset<std::string> expected;
  {
    Journal journal(file(), [](auto, auto) {});
    std::vector<std::thread> threads;
    std::uint64_t first_end = 0;
    for (const int first : {0, 8}) {
      if (first == 8) first_end = journal.position();
      for (int t = first; t < first + 8; ++t)
        threads.emplace_back([&journal, t] {
          for (int i = 0; i < 25; ++i) {
            journal.append(std::to_string(t) + ":" + std::to_string(i));
            if (i % 8 == t % 8) journal.sync();
          }
        });
      if (first == 8) journal.drop_before(first_end);
      for (std::thread& thread : threads) thread.join();
      threads.clear();
    }
    journal.append("end"), journal.sync();
  }
  expected.insert("end");
  for (int t = 8; t < 16; ++t)
    for (int i = 0; i < 25; ++i) expected.insert(std::to_string(t) + ":" + std::to_string(i));
  const Records found = records_of(file());
  EXPECT_EQ(std::multiset<std::string>(found.begin(), found.end()), expected);
}

std::string numbered(std::uint64_t number) {
  return std::to_string(number) + std::string(number * 37 % 5000, '.');
}

// The child says in a pipe what append() accepted, before it appends more.
TEST_F(JournalTest, AKilledWriterLosesNothingThatItAccepted) {
  std::mt19937 random(6);
  std::uint64_t accepted = 0, kept = 0;  // records are their own numbers
  for (int round = 0; round < 40; ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      std::uint64_t next = 0;
      Journal journal(file(), [&](auto, auto) { ++next; });
      for (;; ++next) {
        journal.append(numbered(next));
        const std::uint64_t count = next + 1;
        if (::write(ends[1], &count, sizeof(count)) != sizeof(count)) _exit(1);
      }
    }
    close(ends[1]);
    usleep(static_cast<useconds_t>(1000 + random() % 8000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (std::uint64_t number; read(ends[0], &number, sizeof(number)) == sizeof(number);) accepted = number;
    close(ends[0]);
    std::uint64_t count = 0;
    for (const std::string& record : records_of(file())) ASSERT_EQ(record, numbered(count++));
    ASSERT_GE(count, accepted) << round;
    ASSERT_LE(count, std::max(accepted, kept) + 1) << round;  // one that the kill kept from being said
    ASSERT_GE(count, kept) << round;
    kept = count;
  }
  EXPECT_GT(kept, 40u);
}

}  // namespace
}  // namespace isograd::serve
