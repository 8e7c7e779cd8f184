#include "base/shell.hpp"

#include <gtest/gtest.h>

namespace isograd {
namespace {

TEST(Shell, WordsThatAShellWouldChangeAreQuoted) {
  EXPECT_EQ(shell_words({"train", "runs/a-1.toml", "--set", "a.b=c"}), "train runs/a-1.toml --set a.b=c");
  EXPECT_EQ(shell_words({"my runs", "$(reboot)", "a;b", "`c`", "~", ""}),
            "'my runs' '$(reboot)' 'a;b' '`c`' '~' ''");
  EXPECT_EQ(shell_words({"it's"}), "'it'\\''s'");
}

}  // namespace
}  // namespace isograd
