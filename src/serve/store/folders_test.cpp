// The state folder's lock and version, and folders that are whole or absent.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error_testing.hpp"
#include "base/files.hpp"
#include "serve/store/store.hpp"
#include "serve/store/store_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::HasSubstr;

class Folders : public store_testing::Folder {
 protected:
  std::string opened() const {
    return error_of([&] { const StateFolder folder(directory_ / "state"); });
  }
  std::ptrdiff_t entries() const {
    return std::distance(fs::directory_iterator(directory_), fs::directory_iterator());
  }
};

TEST_F(Folders, TwoServersCannotShareAStateFolder) {
  {
    const StateFolder first(directory_ / "state");
    EXPECT_THAT(opened(), HasSubstr("another server"));
    const pid_t child = fork();
    if (child == 0) _exit(opened().find("another server") != std::string::npos ? 0 : 1);
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(opened(), "no error");
}

TEST_F(Folders, ANewerVersionIsRefusedAndADamagedOneToo) {
  EXPECT_EQ(opened(), "no error");
  const fs::path version = directory_ / "state" / "VERSION";
  EXPECT_EQ(read_file(version), "1\n");
  write_file(version, "2\n");
  EXPECT_THAT(opened(), HasSubstr("version 2"));
  for (const char* text : {"", "x", "1", "0\n", "-1\n", "1\n1\n", "99999999999999999999\n"}) {
    write_file(version, text);
    EXPECT_THAT(opened(), HasSubstr("the number of a version")) << text;
  }
  write_file(version, "1\n");
  EXPECT_EQ(opened(), "no error");
}

TEST_F(Folders, AFileInPlaceOfTheFolderIsRefused) {
  write_file(directory_ / "state", "x");
  EXPECT_NE(opened(), "no error");
}

TEST_F(Folders, AreWholeOrAbsent) {
  const fs::path target = directory_ / "target";
  {
    const WholeFolder folder(target);
    write_file(folder.directory() / "a", "1");
    EXPECT_FALSE(fs::exists(target));
  }
  EXPECT_EQ(entries(), 0);
  WholeFolder first(target), second(target);
  write_file(first.directory() / "a", "1");
  fs::create_directory(second.directory() / "inner");
  write_file(second.directory() / "inner" / "b", "2");
  first.commit();
  EXPECT_EQ(read_file(target / "a"), "1");
  second.commit();
  EXPECT_EQ(read_file(target / "inner" / "b"), "2");
  EXPECT_FALSE(fs::exists(target / "a"));
  EXPECT_EQ(entries(), 1);
}

TEST_F(Folders, LeftoversOfAKilledProcessAreRemoved) {
  const pid_t child = fork();
  if (child == 0) {
    const WholeFolder folder(directory_ / "target");
    write_file(folder.directory() / "a", "1");
    const AtomicFile file(directory_ / "b");
    _exit(0);  // without destructors
  }
  waitpid(child, nullptr, 0);
  for (const char* kept : {"other", ".partial", "run.partial-1"}) write_file(directory_ / kept, "kept");
  EXPECT_EQ(entries(), 5);
  const StateFolder folder(directory_);
  EXPECT_EQ(entries(), 3 + 3);  // and LOCK, VERSION, DOING
}

}  // namespace
}  // namespace isograd::serve
