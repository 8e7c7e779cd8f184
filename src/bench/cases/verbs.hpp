// The verbs' functions and the names that their options take, for the table in verbs.cpp.
#pragma once

#include <string>
#include <vector>

#include "bench/runner.hpp"

namespace isograd {

void bench_comm(Bench& bench);
void bench_context(Bench& bench);
void bench_expert(Bench& bench);
void bench_loss(Bench& bench);
void bench_optim(Bench& bench);
void bench_pipeline(Bench& bench);
void bench_product(Bench& bench);
void bench_ranking(Bench& bench);
void bench_step(Bench& bench);
void bench_tensor(Bench& bench);
void bench_wrapped(Bench& bench);

std::vector<std::string> bench_context_cases();
std::vector<std::string> bench_expert_cases();
std::vector<std::string> bench_loss_cases();
std::vector<std::string> bench_optim_cases();
std::vector<std::string> bench_pipeline_cases();
std::vector<std::string> bench_product_cases();
std::vector<std::string> bench_ranking_cases();
std::vector<std::string> bench_tensor_cases();
std::vector<std::string> bench_step_peers();
std::vector<std::string> bench_step_strategies();

}  // namespace isograd
