// A verdict in the words of whoever asked for it: as text, JSON, a table and a page.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "isograd/verify.hpp"

namespace isograd {

struct Wording {
  std::string left, right;          // of the parity line: "3 ranks" = "1 device"
  std::string reference;            // "one process, fp64"
  std::string subject;              // before a layout's table; empty: "layout NAME, N ranks"
  std::vector<Finding> findings{};  // instead of the verdict's diagnosis, with their evidence
  std::vector<std::string> notices{};
  std::string command{};        // that makes the verdict again
  std::string configuration{};  // TOML
};
Wording verify_wording(const Verdict& verdict);

// The comparison that the shown table claims of one parameter: E1's comparison where E1 is claimed, else
// E2's.
const Comparison& shown(const ParameterVerdict& parameter, const LayoutVerdict& layout);
bool good(const ParameterVerdict& parameter, const LayoutVerdict& layout);
std::vector<const ParameterVerdict*> worst_first(const LayoutVerdict& layout);
std::string scientific(double value);
std::string updates_of(const Trajectory& trajectory);  // "2 updates of AdamW"
std::string words(const Trajectory& trajectory);
// The limits of a grade: the smallest errors of scale, and which parameters a floor judges.
std::vector<std::string> resolution_of(const Grade& grade);
std::string traffic(const LayoutVerdict& layout);

// Which meshes are proved, which are not, and which were not run; no rows where none was tried.
ReportTable meshes_table(const Verdict& verdict);

std::string to_text(const Verdict& verdict, const Wording& wording, std::size_t rows = 8);
std::string to_json(const Verdict& verdict, const Wording& wording);
std::string parity_line(const Verdict& verdict, const Wording& wording);

// A self-contained HTML page. Rank 0 only.
void write_verify_page(const Verdict& verdict, const Wording& wording, const std::filesystem::path& file);

}  // namespace isograd
