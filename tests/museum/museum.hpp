// The museum of biased gradients: mistakes that real trainers shipped, each put into the interface of the
// right component, and what verify must say of it. No product room knows this library; the command line's
// `museum` verb and the tests do.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "isograd/verify.hpp"
#include "isograd/world.hpp"

namespace isograd::museum {

// Puts the wrong component into the right problem, on every rank.
using Plant = std::function<void(VerifyProblem&, World&)>;

// Its texts are in catalogue.json; the code that plants it, in the file of its family.
struct Exhibit {
  std::string id{}, title{};
  std::string mistake{};    // what is done, and why that is another gradient
  std::string who{};        // who makes it
  std::string number{};     // what one would see
  std::string diagnosis{};  // its class (kDiagnoses)
  std::string words{};      // what else it is named by: an axis, some parameters
  std::function<bool(int ranks)> exists = [](int ranks) { return ranks > 1; };
  Plant plant{};
};

// All of them, in the order of the catalogue.
const std::vector<Exhibit>& exhibits();
const Exhibit* find(const std::string& id);  // nullptr: no such one

// Exhibits whose numbers are the same, declared beforehand: one diagnosis for all of them.
struct ExhibitClass {
  std::string diagnosis{};
  std::vector<std::string> exhibits;
  std::string why;
};
const std::vector<ExhibitClass>& shared_classes();

// The right problem of the museum: a small model with every kind of parameter, uneven documents in uneven
// micro-batches, an empty rank from three ranks on, a micro-batch without a target.
VerifyProblem right_problem(World& world);

// Rank 0's verdict of `ranks` thread ranks; an exhibit's, or (null) the right one's.
Verdict show(const Exhibit* exhibit, int ranks);
// The first finding: a diagnosis, "pass", or "fail" without one.
std::string first_finding(const Verdict& verdict);

// A number of random correct configurations (models, packs, accumulation, ranks, strategies, means,
// precisions) from `seed`; the ones that verify does not pass, in words with what it said. `each` hears of
// every one.
std::vector<std::string> false_alarms(int configurations, std::uint64_t seed,
                                      const std::function<void(const std::string&)>& each = {});

// Each family's, in its own file.
void add_normalisation(std::vector<Exhibit>& exhibits);
void add_reduction(std::vector<Exhibit>& exhibits);
void add_norms(std::vector<Exhibit>& exhibits);
void add_data(std::vector<Exhibit>& exhibits);
void add_global(std::vector<Exhibit>& exhibits);
void add_context(std::vector<Exhibit>& exhibits);
void add_tensor(std::vector<Exhibit>& exhibits);
void add_experts(std::vector<Exhibit>& exhibits);
void add_pipeline(std::vector<Exhibit>& exhibits);

}  // namespace isograd::museum
