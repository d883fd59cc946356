// In front of each C++ file of an extension for any CPU (build_lib.py): what it asks of libstdc++.
//
// GCC 12 gave std::condition_variable::wait() another version, because it may no longer throw. The
// older one is in every libstdc++, and does the same. So a wheel runs beside that of GCC 11, as
// RHEL 9 has it.
__asm__(".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "
        "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
