// A verdict in the words of whoever asked for it: as text, JSON, a table and a page.
#pragma once

#include <map>

#include "verify/diagnosis.hpp"

namespace isograd {

struct Wording {
  std::string left, right;          // of the parity line: "3 ranks" = "1 device"
  std::string reference;            // "one process, fp64"
  std::string subject;              // before a layout's table; empty: "layout NAME, N ranks"
  std::vector<Finding> findings{};  // instead of the verdict's diagnosis, with their evidence
  std::vector<std::string> notices{};
  std::string command{};                         // that makes the verdict again
  std::string configuration{};                   // TOML
  std::map<std::string, std::string> changes{};  // by finding: a line that says what to change, with code
  std::string layouts{};  // behind `right`: " under bucketed, zero2"; of a verdict that fails the failed ones
};
Wording verify_wording(const Verdict& verdict);
// `alone`: the dump of that option, if given. mean: what the loss is divided by, as isograd.watch has it.
Wording compare_wording(const DumpComparison& comparison, const DumpNames& names, const std::string& alone,
                        const std::string& mean = "token");

// The change to make in a training loop of PyTorch, in a line with code between backticks; empty for findings
// that only `verify` has. finding: its id, and after a space `which` if it has one. peers: some ranks see the
// same samples.
std::string change_of(const std::string& finding, const std::string& mean = "token", bool peers = false);

std::string updates_of(const Trajectory& trajectory);  // "2 updates of AdamW"

std::string to_text(const Verdict& verdict, const Wording& wording, std::size_t rows = 8);
std::string to_json(const Verdict& verdict, const Wording& wording);
std::string parity_line(const Verdict& verdict, const Wording& wording);

// One HTML page that stands alone and explains itself. Rank 0 only.
void write_verify_page(const Verdict& verdict, const Wording& wording, const std::filesystem::path& file);

}  // namespace isograd
