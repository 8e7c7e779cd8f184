// Named checkpoints: names, tenants, expiry, damage, and a store whose writer is killed.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
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

CheckpointInfo info_of(const std::string& name, const std::string& tenant = "ann", double created = 1000) {
  CheckpointInfo info;
  info.run = "0123abcd:train:0", info.kind = "weights", info.name = name, info.tenant = tenant;
  info.base = "Qwen/Qwen3-0.6B", info.rank = 32, info.created = created;
  info.metadata = {{"step", "7"}, {"note", "\"\n\xff"}};
  return info;
}

auto writes(const std::string& text) {
  return [text](const fs::path& directory) {
    write_file(directory / "adapter.safetensors", text);
    fs::create_directory(directory / "optimizer");
    write_file(directory / "optimizer" / "moments", text + text);
    return static_cast<std::int64_t>(3 * text.size());
  };
}

std::vector<std::string> names(const CheckpointStore& store) {
  std::vector<std::string> found;
  for (const auto& [path, info] : store.all()) found.push_back(info.name);
  return found;
}

const CheckpointInfo* find(const CheckpointStore& store, const std::string& name) {
  const auto found = store.all().find(info_of(name).path());
  return found == store.all().end() ? nullptr : &found->second;
}

class Checkpoints : public store_testing::Folder {
 protected:
  fs::path root() const { return directory_ / "checkpoints"; }
  std::ptrdiff_t entries() const {
    return std::distance(fs::directory_iterator(root()), fs::directory_iterator());
  }
};

TEST(CheckpointNames, AreChecked) {
  for (const std::string& name : {std::string("a"), std::string("step-00010.final_2"), std::string("..."),
                                  std::string(".hidden"), std::string("CON"), std::string(128, 'x')})
    EXPECT_EQ(error_of([&] { check_checkpoint_name(name); }), "no error") << name;
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("a/b"), std::string("%2e%2e"),
        std::string("a\0b", 3), std::string(300, 'x'), std::string("a\nb"), std::string("\x1b[2J"),
        std::string("a b"), std::string("\xc3\xa9"), std::string("~"), std::string("a+b"), std::string("a:b"),
        std::string("a\\b")})
    EXPECT_THAT(error_of([&] { check_checkpoint_name(name); }), HasSubstr("1 to 128 of")) << name;
  EXPECT_THAT(error_of([] { check_checkpoint_name("\x1b[2J"); }), ::testing::Not(HasSubstr("\x1b")));
}

TEST(CheckpointPaths, AreParsed) {
  const CheckpointInfo info = parse_checkpoint_path("tinker://s:train:3/sampler_weights/final");
  EXPECT_EQ(info.run, "s:train:3");
  EXPECT_EQ(info.kind, "sampler_weights");
  EXPECT_EQ(info.name, "final");
  EXPECT_EQ(info.path(), "tinker://s:train:3/sampler_weights/final");
  for (const char* path :
       {"", "tinker://", "tinker://a", "tinker://a/weights", "tinker://a/weights/b/c", "file://a/weights/b",
        "tinker:///weights/b", "tinker://a//b", "tinker://a/weights/", "tinker://a/other/b",
        "tinker://../weights/b", "tinker://a~b/weights/b", "tinker://a+b/weights/b", "tinker://a/weights/..",
        "TINKER://a/weights/b"})
    EXPECT_NE(error_of([&] { parse_checkpoint_path(path); }), "no error") << path;
  EXPECT_NE(error_of([] { parse_checkpoint_path("tinker://" + std::string(81, 'r') + "/weights/b"); }),
            "no error");
}

TEST_F(Checkpoints, TheLongestNameFits) {
  CheckpointInfo info = info_of(std::string(128, 'n'));
  info.run = std::string(80, 'r'), info.kind = "external_weights";
  CheckpointStore(root()).save(info, writes("x"));
  EXPECT_TRUE(CheckpointStore(root()).all().contains(info.path()));
}

TEST_F(Checkpoints, ComeBackAsTheyWereSaved) {
  CheckpointInfo info = info_of("a");
  info.expires = 2000.5, info.is_public = true;
  CheckpointStore(root()).save(info, writes("hello"));
  const CheckpointStore store(root());
  EXPECT_TRUE(store.ignored().empty());
  const CheckpointInfo* found = find(store, "a");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->path(), "tinker://0123abcd:train:0/weights/a");
  EXPECT_EQ(found->tenant, "ann");
  EXPECT_EQ(found->base, info.base);
  EXPECT_EQ(found->rank, 32);
  EXPECT_EQ(found->bytes, 15);
  EXPECT_EQ(found->created, 1000);
  EXPECT_EQ(found->expires, 2000.5);
  EXPECT_TRUE(found->is_public);
  EXPECT_EQ(found->metadata.at("step"), "7");
  EXPECT_EQ(read_file(store.directory(*found) / "optimizer" / "moments"), "hellohello");
  store.check_files(*found);
}

TEST_F(Checkpoints, AreReplacedUpdatedAndRemoved) {
  CheckpointStore store(root());
  EXPECT_EQ(store.save(info_of("a"), writes("first")).bytes, 15);
  store.save(info_of("a"), writes("third"));
  EXPECT_EQ(read_file(store.directory(info_of("a")) / "adapter.safetensors"), "third");
  EXPECT_EQ(entries(), 1);
  EXPECT_THAT(error_of([&] { store.save(info_of("../b"), writes("x")); }), HasSubstr("tinker://<run>"));
  store.save(info_of("b"), writes("x"));
  CheckpointInfo info = *find(store, "a");
  info.is_public = true, info.expires = 2000;
  store.update(info);
  for (const CheckpointStore& each : {store, CheckpointStore(root())}) {
    EXPECT_TRUE(find(each, "a")->is_public);
    EXPECT_EQ(find(each, "a")->expires, 2000);
    EXPECT_EQ(names(each), (std::vector<std::string>{"a", "b"}));
    each.check_files(info);
  }
  store.remove(info);
  EXPECT_EQ(entries(), 1);
  store.remove(*find(store, "b"));
  EXPECT_EQ(entries(), 0);
  EXPECT_TRUE(CheckpointStore(root()).all().empty());
}

// The kernel kills the child in the middle of a write.
TEST_F(Checkpoints, NothingIsLeftOfAnUpdateThatIsKilled) {
  const CheckpointInfo info = info_of("a");
  CheckpointStore(root()).save(info, writes("hello"));
  write_file(root() / "notes", "a user's");
  fs::create_directory(root() / ".mine");
  const fs::path folder = CheckpointStore(root()).directory(info);
  const auto in_folder = [&] {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  };
  const std::ptrdiff_t sound = in_folder();
  const pid_t child = fork();
  if (child == 0) {
    CheckpointStore store(root());
    const rlimit few{.rlim_cur = 10, .rlim_max = 10};
    setrlimit(RLIMIT_FSIZE, &few);
    store.update(info);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ);
  EXPECT_EQ(in_folder(), sound + 1);
  const CheckpointStore store(root());
  EXPECT_EQ(in_folder(), sound);
  store.check_files(info);
  EXPECT_EQ(names(store), std::vector<std::string>{"a"});
  EXPECT_EQ(entries(), 3);
}

TEST_F(Checkpoints, DamageIsFound) {
  CheckpointStore store(root());
  const CheckpointInfo info = info_of("a");
  store.save(info, writes("hello"));
  const fs::path file = store.directory(info) / "optimizer" / "moments",
                 text = store.directory(info) / "info.json";
  write_file(file, "hellohellO");
  EXPECT_THAT(error_of([&] { store.check_files(info); }), HasSubstr("another checksum"));
  fs::remove(file);
  EXPECT_THAT(error_of([&] { store.check_files(info); }), HasSubstr("no regular file"));
  std::string changed = read_file(text);
  changed.replace(changed.find("\"ann\""), 5, "\"bob\"");
  for (const std::string& wrong :
       {changed, std::string(), std::string("{}"), std::string("[1]"), std::string("{\"checksum\": 1}")}) {
    write_file(text, wrong);
    const CheckpointStore again(root());
    EXPECT_TRUE(again.all().empty());
    ASSERT_EQ(again.ignored().size(), 1u) << wrong;
    EXPECT_THAT(again.ignored()[0], HasSubstr("info.json"));
  }
}

TEST_F(Checkpoints, LinksAreNotFollowed) {
  const CheckpointInfo info = info_of("a");
  CheckpointStore(root()).save(info, writes("hello"));
  const fs::path folder = CheckpointStore(root()).directory(info), secret = directory_ / "secret";
  fs::create_directory(secret);
  write_file(secret / "adapter.safetensors", "hello");
  write_file(secret / "moments", "hellohello");
  for (const char* name : {"adapter.safetensors", "optimizer"}) {
    const fs::path kept = directory_ / "kept";
    fs::rename(folder / name, kept);
    fs::create_symlink(std::string(name) == "optimizer" ? secret : secret / name, folder / name);
    const CheckpointStore store(root());
    EXPECT_THAT(error_of([&] { store.check_files(info); }), HasSubstr("a symbolic link"));
    fs::remove(folder / name);
    fs::rename(kept, folder / name);
    store.check_files(info);
  }
  // The checkpoint itself is a link.
  fs::rename(folder, directory_ / "moved");
  fs::create_directory_symlink(directory_ / "moved", folder);
  CheckpointStore store(root());
  EXPECT_TRUE(store.all().empty());
  EXPECT_EQ(store.ignored().size(), 1u);
  store.save(info, writes("new"));  // replaces the link, not what is behind it
  EXPECT_FALSE(fs::is_symlink(folder));
  EXPECT_EQ(read_file(directory_ / "moved" / "adapter.safetensors"), "hello");
  fs::create_symlink(secret / "moments", folder / "more");
  store.remove(info);
  EXPECT_EQ(read_file(secret / "moments"), "hellohello");
}

TEST_F(Checkpoints, AFullDiskLeavesNothing) {
  CheckpointStore store(root());
  store.save(info_of("a"), writes("old"));
  {
    const store_testing::FullDisk full(2000);
    for (const char* name : {"a", "b"})
      EXPECT_THAT(error_of([&] { store.save(info_of(name), writes(std::string(1500, 'x'))); }),
                  HasSubstr("bytes free"));
  }
  EXPECT_EQ(entries(), 1);
  EXPECT_EQ(names(store), std::vector<std::string>{"a"});
  store.check_files(info_of("a"));
  store.save(info_of("b"), writes(std::string(1500, 'x')));
}

TEST_F(Checkpoints, AreWholeWhereverTheWriterIsKilled) {
  std::mt19937 random(7);
  std::size_t most = 0;
  CheckpointStore(root()).save(info_of("0"), writes("x"));
  for (int round = 0; round < 100; ++round) {
    const unsigned seed = random();
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      std::mt19937 own(seed);
      CheckpointStore store(root());
      for (;;) {
        const CheckpointInfo info = info_of(std::to_string(own() % 6));
        // "0" is overwritten but never removed: no kill may lose it.
        switch (info.name != "0" && find(store, info.name) ? own() % 4 : 0) {
          case 1: store.remove(info); break;
          case 2: store.update(info); break;
          default: store.save(info, writes(std::string(own() % 3000, 'x')));
        }
        if (::write(ends[1], "", 1) != 1) _exit(1);
      }
    }
    // Anywhere within the operation after the second one, which takes about as long as that.
    char done;
    ASSERT_EQ(::read(ends[0], &done, 1), 1);
    const auto begun = std::chrono::steady_clock::now();
    ASSERT_EQ(::read(ends[0], &done, 1), 1);
    const auto took = std::chrono::steady_clock::now() - begun;
    std::this_thread::sleep_for(took * std::uniform_real_distribution<>(0, 1)(random));
    int status = 0;
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    for (const int end : ends) ::close(end);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the writer ended by itself";
    const CheckpointStore store(root());
    ASSERT_TRUE(store.ignored().empty()) << store.ignored()[0];
    ASSERT_NE(find(store, "0"), nullptr) << round;
    for (const auto& [path, info] : store.all()) store.check_files(info);
    ASSERT_EQ(entries(), static_cast<std::ptrdiff_t>(store.all().size()));
    most = std::max(most, store.all().size());
  }
  EXPECT_GT(most, 2u);
}

}  // namespace
}  // namespace isograd::serve
