// isograd config: a configuration checked and written out; the page and the schema of all keys.
#include <cstdio>

#include "base/print.hpp"
#include "cli/verbs.hpp"
#include "train/config.hpp"

namespace isograd {

Verb config_verb(CLI::App& program) {
  CLI::App* verb =
      program.add_subcommand("config", "Check a configuration and print it with all keys, defaults included");
  struct Flags {
    std::string file;
    std::vector<std::string> sets;
    bool markdown = false, schema = false;
  };
  auto flags = std::make_shared<Flags>();
  verb->add_option("CONFIG", flags->file, "TOML file of the run; without one, the defaults are printed");
  add_option(*verb, "--set", flags->sets, "override a key of the file, as in --set train.steps=50",
             "KEY=VALUE");
  verb->add_flag("--markdown", flags->markdown,
                 "print the page that documents every key (docs/configuration.md)");
  verb->add_flag("--schema", flags->schema, "print the JSON schema of a configuration, for editors")
      ->excludes("--markdown");
  verb->footer(
      "Exit status: 0 valid; 2 not valid, and the message names the file, the line and the nearest key.");
  const auto action = [flags] {
    if (flags->schema) return print(stdout, configuration_schema()), 0;
    const RunConfig config = load_config(flags->file, flags->sets);
    print(stdout, flags->markdown ? configuration_markdown() : to_toml(config));
    return 0;
  };
  return {verb, action};
}

}  // namespace isograd
