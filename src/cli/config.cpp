// isograd config: a configuration checked and written out, and the page that documents every key.
#include <cstdio>

#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "train/config.hpp"

namespace isograd {

Verb config_verb(CLI::App& program) {
  CLI::App* verb =
      program.add_subcommand("config", "Check a configuration and print it with every key written out");
  struct Flags {
    std::string file;
    std::vector<std::string> sets;
    bool markdown = false;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("CONFIG", flags->file, "TOML file; the defaults unless given");
  add_option(*verb, "--set", flags->sets, "overrides the file; may be repeated", "KEY=VALUE");
  verb->add_flag("--markdown", flags->markdown, "the page that documents every key (docs/configuration.md)");
  verb->footer("Status: 0 valid; 2 not: the message names file, line and the nearest key.");
  const auto action = [flags] {
    const RunConfig config = load_config(flags->file, flags->sets);
    print(stdout, flags->markdown ? configuration_markdown() : to_toml(config));
    return 0;
  };
  return {verb, action};
}

}  // namespace isograd
