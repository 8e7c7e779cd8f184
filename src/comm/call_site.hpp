// The place in the source that called the current collective; c10d's options have no field for it.
#pragma once

namespace isograd {

struct CallSite {
  const char* file = nullptr;  // null: unknown, as in calls through c10d
  unsigned line = 0;
};

namespace detail {
inline thread_local CallSite call_site;
}

inline CallSite current_call_site() { return detail::call_site; }

// Sets the call site of this thread while the object lives.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site) : outer_(detail::call_site) { detail::call_site = site; }
  ~CallSiteScope() { detail::call_site = outer_; }
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

 private:
  CallSite outer_;
};

}  // namespace isograd
